"""The semantic ops, one file each; importing this package registers them as ``torch.ops.speccompile.*``."""

from speccompile.ops import attention as attention
from speccompile.ops import choose as choose
from speccompile.ops import commit as commit
from speccompile.ops import likeliest as likeliest
from speccompile.ops import native as native
from speccompile.ops import ngram as ngram
from speccompile.ops import tree as tree
from speccompile.ops import within_top as within_top

__all__ = ["attention", "choose", "commit", "likeliest", "native", "ngram", "tree", "within_top"]

"""The semantic ops, one file each; importing this package registers them as ``torch.ops.speccompile.*``."""

from speccompile.ops import attention as attention
from speccompile.ops import choose as choose
from speccompile.ops import commit as commit
from speccompile.ops import native as native
from speccompile.ops import near_top as near_top
from speccompile.ops import ngram as ngram

__all__ = ["attention", "choose", "commit", "native", "near_top", "ngram"]

"""The semantic ops, one file each; importing this package registers them as ``torch.ops.speccompile.*``."""

from speccompile.lowering.ops import attention as attention
from speccompile.lowering.ops import choose as choose
from speccompile.lowering.ops import commit as commit
from speccompile.lowering.ops import cut as cut
from speccompile.lowering.ops import native as native
from speccompile.lowering.ops import near as near
from speccompile.lowering.ops import ngram as ngram

__all__ = ["attention", "choose", "commit", "cut", "native", "near", "ngram"]

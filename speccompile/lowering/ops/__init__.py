"""The semantic ops, one file each; importing this package registers them as ``torch.ops.speccompile.*``."""

from speccompile.lowering.ops import attention as attention
from speccompile.lowering.ops import choose as choose
from speccompile.lowering.ops import native as native

__all__ = ["attention", "choose", "native"]

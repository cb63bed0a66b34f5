"""The semantic ops, one file each; importing this package imports every file, which registers its ops as
``torch.ops.speccompile.*``."""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    # A package has kernels, which are imported when they are needed.
    if not _module.ispkg:
        import_module(f"{__name__}.{_module.name}")

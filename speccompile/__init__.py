"""speccompile: speculative decoding for Hugging Face models, as compiler passes over one step graph."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from speccompile import (
        acceptance,
        backends,
        errors,
        guides,
        heads,
        hidden_states,
        modes,
        passes,
        policies,
        pretrained,
        quantized,
        sampling,
        traces,
        training,
    )
    from speccompile.adapters.options import Adapters
    from speccompile.calibration.calibration import Calibration
    from speccompile.calibration.gather import calibrate
    from speccompile.graph.tree import Tree
    from speccompile.lowering.backends import register_backend
    from speccompile.modes import register as register_mode
    from speccompile.quantization import quantize
    from speccompile.sampling import register_processor
    from speccompile.speculator.speculator import Speculator
    from speccompile.wrapping import load, wrap

__version__ = "0.1.0"

__all__ = [
    "Adapters",
    "Calibration",
    "Speculator",
    "Tree",
    "__version__",
    "acceptance",
    "backends",
    "calibrate",
    "errors",
    "guides",
    "heads",
    "hidden_states",
    "load",
    "modes",
    "passes",
    "policies",
    "pretrained",
    "quantize",
    "quantized",
    "register_backend",
    "register_mode",
    "register_processor",
    "sampling",
    "traces",
    "training",
    "wrap",
]

# Imported at first use: the import of torch and transformers lasts seconds, and `speccompile --help` needs neither.
_SUBMODULES = frozenset(
    {
        "acceptance",
        "backends",
        "errors",
        "guides",
        "heads",
        "hidden_states",
        "modes",
        "passes",
        "policies",
        "pretrained",
        "quantized",
        "sampling",
        "traces",
        "training",
    },
)
_MEMBERS = {
    "Adapters": ("speccompile.adapters.options", "Adapters"),
    "Calibration": ("speccompile.calibration.calibration", "Calibration"),
    "Speculator": ("speccompile.speculator.speculator", "Speculator"),
    "Tree": ("speccompile.graph.tree", "Tree"),
    "calibrate": ("speccompile.calibration.gather", "calibrate"),
    "load": ("speccompile.wrapping", "load"),
    "quantize": ("speccompile.quantization", "quantize"),
    "register_backend": ("speccompile.lowering.backends", "register_backend"),
    "register_mode": ("speccompile.modes", "register"),
    "register_processor": ("speccompile.sampling", "register_processor"),
    "wrap": ("speccompile.wrapping", "wrap"),
}


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name in _MEMBERS:
        module, member = _MEMBERS[name]
        found = globals()[name] = getattr(importlib.import_module(module), member)
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

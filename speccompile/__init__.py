"""speccompile: speculative decoding for Hugging Face models, as compiler passes over one step graph."""

from speccompile import acceptance, errors, guides, modes
from speccompile.modes import register as register_mode
from speccompile.speculator import Speculator
from speccompile.wrap import load, wrap

__version__ = "0.1.0"

__all__ = ["Speculator", "__version__", "acceptance", "errors", "guides", "load", "modes", "register_mode", "wrap"]

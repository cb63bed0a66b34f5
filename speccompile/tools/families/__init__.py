"""Model families of transformers, each with a model that is small enough for a test."""

from speccompile.tools.families.family import Family, causal_lm_families, find_families
from speccompile.tools.families.tiny import tiny_model
from speccompile.tools.families.tiny_config import tiny_config

__all__ = [
    "Family",
    "causal_lm_families",
    "find_families",
    "tiny_config",
    "tiny_model",
]

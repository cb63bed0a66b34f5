"""The sampling pipeline: processors that change the target's logits before a token is chosen, one file for each family.

Order, names and values are those of transformers' logits processors and warpers. Your own processor derives from
``Processor`` and is added by ``register_processor`` (``examples/custom_processor.py``).
"""

from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, Processor, number, whole
from speccompile.sampling.pipeline import OPTIONS
from speccompile.sampling.register import register_processor

__all__ = ["OPTIONS", "N", "Option", "Processor", "StateSpec", "number", "register_processor", "whole"]

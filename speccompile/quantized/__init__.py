"""Quantised weights of checkpoints. Steps multiply with the integers that the checkpoint stores."""

from __future__ import annotations

from speccompile.quantized.reading import read
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights

__all__ = ["GroupedWeight", "QuantizedWeights", "read"]

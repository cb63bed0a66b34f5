"""Weights of checkpoints that are quantised already, whose integers steps multiply with."""

from __future__ import annotations

from speccompile.quantized.reading import read
from speccompile.quantized.weight import GroupedWeight, QuantizedWeights

__all__ = ["GroupedWeight", "QuantizedWeights", "read"]

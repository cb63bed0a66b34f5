"""The result of a reader: weights as integers, the other tensors, and the model's config."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from transformers import PretrainedConfig

from speccompile.quantized.source import TensorSource
from speccompile.quantized.weight import QuantizedWeights

T = TypeVar("T")


class OnLookup(Mapping[str, T], Generic[T]):
    """A mapping that reads a value from a file at each lookup, and keeps none of them."""

    def __init__(self, readers: Mapping[str, Callable[[], T]]) -> None:
        self._readers = dict(readers)

    def __getitem__(self, name: str) -> T:
        return self._readers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint. Its tensors are read at each lookup.

    Args:
        weights: the quantised weights, by the names of the Hugging Face model's parameters.
        others: floating-point tensors, by the same names.
        config: the model's config, without the quantisation.
    """

    source: TensorSource
    weights: QuantizedWeights
    others: Mapping[str, torch.Tensor]
    config: PretrainedConfig

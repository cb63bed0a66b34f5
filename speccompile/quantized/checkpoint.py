"""What a reader returns: weights as integers, the other tensors, and how the model is configured."""

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
    """A mapping whose values are read from a file at each lookup, so that it holds none of them."""

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
    """An opened checkpoint. Its tensors are read when they are looked up.

    Args:
        weights: those that are quantised, by the names of the Hugging Face model's parameters.
        others: tensors of floating point, by these names.
        config: of the model, without the quantisation.
    """

    source: TensorSource
    weights: QuantizedWeights
    others: Mapping[str, torch.Tensor]
    config: PretrainedConfig

"""Weights in the layout that steps read: what a packed folder stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from speccompile.utils.weight_forms import Forms, QuantizedForms


@dataclass(frozen=True, eq=False)
class PackedWeight:
    """A weight in the tensors of one form of ``ops/cpu/forms``.

    Args:
        form: name of the form, such as ``"int4"``.
        tensors: those of the form, in its order.
        shape: ``(N, K)``, or ``(E, N, K)`` of experts.
        order: int64 ``[K]``, the input that each column is multiplied with; None means their own order.
        transposed: whether the model's weight has the last two dimensions in the other order.
    """

    form: str
    tensors: tuple[torch.Tensor, ...]
    shape: tuple[int, ...]
    order: torch.Tensor | None = None
    transposed: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)


class PackedWeights(QuantizedForms, Mapping[str, PackedWeight]):
    """Packed weights by the names of the Hugging Face model's parameters.

    Args:
        weights: by name. The mapping may map a file at each lookup: each weight is looked up once.
        format: what was packed, for ``explain()``: ``"packed int4"``.
        folder: hash of the packed folder that has all weights of the model.
    """

    def __init__(self, weights: Mapping[str, PackedWeight], format: str, folder: str) -> None:
        self._weights = weights
        self.format, self.folder = format, folder
        self.others: Forms = "same"

    def __getitem__(self, name: str) -> PackedWeight:
        return self._weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    def __repr__(self) -> str:
        return f"<{len(self)} packed weights, {self.format}>"

"""Weights laid out for the C++ ops, and kept equal to the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from speccompile.lowering.cpu.consume import ConsumedWeights

#: Outputs that lie side by side in a packed weight.
COLUMNS = 32
PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to ``[ceil(N / 32), K, 32]``, a copy; columns behind N are zeros."""
    features, depth = weight.shape
    missing = -features % COLUMNS
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(-1, COLUMNS, depth).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def unpack(packed: torch.Tensor, features: int) -> torch.Tensor:
    """What :func:`pack` was given."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:features]


class WeightPacks:
    """The packed weights of a wrap: each one once, for all tiers and prefill.

    With ``consumed`` they are to become the model's own.
    """

    def __init__(self, consumed: ConsumedWeights | None = None) -> None:
        self.consumed = consumed
        self._packs: dict[str, tuple[torch.Tensor | None, torch.Tensor]] = {}

    def of(self, path: str, weight: torch.Tensor) -> torch.Tensor:
        """The packed form of ``weight``, ``[N, K]``, which is the model's or a transposed view of that."""
        if path not in self._packs:
            self._packs[path] = (None if self.consumed else weight), pack(weight)
        return self._packs[path][1]

    def refresh(self) -> None:
        """The model's weights were changed in place: change the packs, in place too."""
        for weight, packed in self._packs.values():
            if weight is not None:
                packed.copy_(pack(weight))

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, packed in self._packs.values())

    def __len__(self) -> int:
        return len(self._packs)

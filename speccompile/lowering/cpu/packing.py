"""Weights laid out for the C++ ops, and kept equal to the model's own."""

from __future__ import annotations

import torch
import torch.nn.functional as F

#: Outputs that lie side by side in a packed weight.
COLUMNS = 32
PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to ``[ceil(N / 32), K, 32]``, a copy; columns behind N are zeros."""
    features, depth = weight.shape
    padded = F.pad(weight, (0, 0, 0, -features % COLUMNS))
    return padded.view(-1, COLUMNS, depth).transpose(1, 2).contiguous()


def unpack(packed: torch.Tensor, features: int) -> torch.Tensor:
    """What :func:`pack` was given."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:features]


class WeightPacks:
    """The packed weights of a wrap: each one once, for all tiers and prefill."""

    def __init__(self) -> None:
        self._packs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, path: str, weight: torch.Tensor) -> torch.Tensor:
        """The packed form of ``weight``, ``[N, K]``, which is the model's or a transposed view of that."""
        if path not in self._packs:
            self._packs[path] = weight, pack(weight)
        return self._packs[path][1]

    def refresh(self) -> None:
        """The model's weights were changed in place: change the packs, in place too."""
        for weight, packed in self._packs.values():
            packed.copy_(pack(weight))

    @property
    def nbytes(self) -> int:
        return sum(packed.nbytes for _, packed in self._packs.values())

    def __len__(self) -> int:
        return len(self._packs)

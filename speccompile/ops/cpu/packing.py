"""Weights laid out for the C++ ops, and kept equal to the model's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
import torch.nn.functional as F

if TYPE_CHECKING:
    from speccompile.ops.cpu.consume import ConsumedWeights

#: Outputs that lie side by side in a packed weight.
COLUMNS = 32
#: Inputs that share a scale in int8.
GROUP = 64
PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

#: ``same``: the model's own values; ``int8``: rounded, which makes another model of it.
WeightForm = Literal["same", "int8"]


def pack(weight: torch.Tensor) -> torch.Tensor:
    """``[N, K]`` to ``[ceil(N / 32), K, 32]``, a copy; columns after N are zeros."""
    features, depth = weight.shape
    missing = -features % COLUMNS
    padded = F.pad(weight, (0, 0, 0, missing)) if missing else weight
    return padded.view(-1, COLUMNS, depth).transpose(1, 2).clone(memory_format=torch.contiguous_format)


def unpack(packed: torch.Tensor, features: int) -> torch.Tensor:
    """What :func:`pack` was given."""
    return packed.transpose(1, 2).reshape(-1, packed.shape[1])[:features]


def quantise(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` in groups of 64 along K, the greatest of each being 127: int8 ``[N, G, 64]`` and float32 ``[N, G]``.

    The rounding of llama.cpp's Q8_0, with groups twice as large.
    """
    groups = F.pad(values.float(), (0, -values.shape[1] % GROUP)).unflatten(1, (-1, GROUP))
    most = groups.abs().amax(-1)
    # A number over a tensor is the tensor's reciprocal times the number, in torch: rounded twice.
    factor = torch.full_like(most, 127) / most
    # Neither of zeros, nor of what is so small that its factor is infinite, nor of what is not a number.
    factor = torch.where(factor.isfinite(), factor, 0)
    return (groups * factor[..., None]).round().to(torch.int8), most / 127


def pack_int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``[N, K]`` to int8 ``[ceil(N / 32), 16 * G, 32, 4]`` and scales, float32, ``[ceil(N / 32), G, 32]``."""
    rounded, scales = quantise(F.pad(weight, (0, 0, 0, -weight.shape[0] % COLUMNS)))
    packed = rounded.flatten(1).unflatten(1, (-1, 4)).unflatten(0, (-1, COLUMNS)).transpose(1, 2)
    return packed.contiguous(), scales.unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()


def unpack_int8(packed: torch.Tensor, scales: torch.Tensor, features: int, depth: int) -> torch.Tensor:
    """The weight, float32 ``[features, depth]``, that :func:`pack_int8` rounded."""
    groups = packed.unflatten(1, (-1, GROUP // 4)) * scales[:, :, None, :, None]
    return groups.permute(0, 3, 1, 2, 4).flatten(2).flatten(0, 1)[:features, :depth]


class WeightPacks:
    """The packed weights of a wrap: each one once, for all tiers and prefill.

    With ``consumed`` they are to become the model's own. ``followers`` are packs of a drafter, whose weights may be the
    same ones, and then the packs are.
    """

    def __init__(self, form: WeightForm = "same", consumed: ConsumedWeights | None = None) -> None:
        self.form = form
        self.consumed = consumed
        self.followers: list[WeightPacks] = []
        self._packs: dict[str, tuple[torch.Tensor | None, tuple[torch.Tensor, ...]]] = {}

    def of(self, path: str, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The tensors that stand for ``weight``, ``[N, K]``, which is the model's or a transposed view of that."""
        if path not in self._packs:
            packed = self._known(weight) or self._make(weight)
            self._packs[path] = (None if self.consumed else weight), packed
        return self._packs[path][1]

    def _known(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...] | None:
        """A follower's pack of the same tensor."""
        for follower in self.followers:
            for own, packed in follower._packs.values():
                if follower.form == self.form and own is not None and _same_tensor(own, weight):
                    return packed
        return None

    def refresh(self) -> None:
        """The model's weights were changed in place: change the packs, in place too."""
        for weight, packed in self._packs.values():
            if weight is not None:
                for old, new in zip(packed, self._make(weight), strict=True):
                    old.copy_(new)
        for follower in self.followers:
            follower.refresh()

    def repacked(self, weight: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The packs of ``weight``, each with what it has to become where the weight becomes ``value``, of the same
        shape and strides."""
        return [
            pair
            for own, packed in self._packs.values()
            if own is not None and _same_tensor(own, weight)
            for pair in zip(packed, self._make(value), strict=True)
        ]

    def _make(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return pack_int8(weight) if self.form == "int8" else (pack(weight),)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What was packed and is still there, by path."""
        return {path: weight for path, (weight, _) in self._packs.items() if weight is not None}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, packed in self._packs.values() for tensor in packed)

    def __len__(self) -> int:
        return len(self._packs)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())

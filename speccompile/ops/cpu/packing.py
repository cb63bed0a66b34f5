"""Packed weights, kept equal to the model's own, or to what these are rounded to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.utils.weight_forms import WeightForms

if TYPE_CHECKING:
    from speccompile.ops.cpu.consume import ConsumedWeights
    from speccompile.ops.cpu.quantized import QuantizedPacks

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pack:
    """A packed weight ``[features, depth]``.

    Args:
        tensors: what stands for it, see :class:`~speccompile.ops.cpu.forms.base.Form`.
        weight: the model's, or a transposed view of that; None once it is consumed.
        of_vocabulary: it is an embedding's or an lm_head's.
        format: of the checkpoint whose integers it holds; empty where ``weight`` was packed.
        order: int64 ``[depth]``, the input that each of its columns is multiplied with; None: all in their order.
    """

    form: Form
    tensors: tuple[torch.Tensor, ...]
    features: int
    depth: int
    weight: torch.Tensor | None
    of_vocabulary: bool = False
    format: str = ""
    order: torch.Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def description(self) -> str:
        """For ``explain()``, after a number of weights."""
        return f"of {self.format} in {self.form.name}" if self.format else self.form.description

    def unpack(self) -> torch.Tensor:
        """The values that the ops multiply with, ``[features, depth]``."""
        return self.form.unpack(self.tensors, self.features, self.depth)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``[..., depth]`` as the ops read them."""
        return x if self.order is None else x.index_select(-1, self.order)

    def dequantized(self) -> torch.Tensor:
        """The weight ``[features, depth]`` over inputs in their own order."""
        return self.unpack() if self.order is None else self.unpack()[:, self.order.argsort()]


class WeightPacks:
    """The packed weights of a wrap: each one once, for all tiers and prefill.

    With ``consumed`` they are to become the model's own. ``followers`` are packs of a drafter, whose weights may be the
    same ones, and then the packs are. ``names`` are all names of a weight by each of them, where it has several.
    ``quantized`` are packed already.
    """

    def __init__(
        self,
        forms: WeightForms | None = None,
        consumed: ConsumedWeights | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
        quantized: QuantizedPacks | None = None,
    ) -> None:
        self.forms = WeightForms() if forms is None else forms
        self.consumed = consumed
        self.quantized = quantized
        self.followers: list[WeightPacks] = []
        self._names = {} if names is None else names
        self._packs: dict[str, Pack] = {}
        #: Names of ``forms`` that decided on a weight.
        self._keys_used: set[str] = set()

    def of(self, path: str, weight: torch.Tensor, *, of_vocabulary: bool = False) -> Pack:
        """The pack of ``weight``, ``[N, K]``, which is the model's or a transposed view of that.

        Args:
            of_vocabulary: it is an embedding's or an lm_head's.
        """
        if path not in self._packs and (quantized := self.find_quantized(weight)) is not None:
            self._packs[path] = quantized
        if path not in self._packs:
            modules = [name.rpartition(".")[0] for name in self._names.get(path, (path,))]
            key = self.forms.key(modules)
            if key is not None:
                self._keys_used.add(key)
            form = FORMS[self.forms.form(modules, of_vocabulary=of_vocabulary)]
            tensors = self._known(weight, form) or form.pack(weight)
            features, depth = weight.shape
            own = None if self.consumed else weight
            self._packs[path] = Pack(form, tensors, features, depth, own, of_vocabulary)
        return self._packs[path]

    def find_quantized(self, weight: torch.Tensor) -> Pack | None:
        """The pack of a quantised checkpoint that stands for ``weight``."""
        return None if self.quantized is None else self.quantized.find(weight)

    def unused_names(self) -> list[str]:
        """Names of modules with a form of their own that no packed weight has."""
        return [name for name, _ in self.forms.modules if name not in self._keys_used]

    def _known(self, weight: torch.Tensor, form: Form) -> tuple[torch.Tensor, ...] | None:
        """A follower's pack of the same tensor."""
        for follower in self.followers:
            for pack in follower:
                if pack.form is form and pack.weight is not None and _same_tensor(pack.weight, weight):
                    return pack.tensors
        return None

    def refresh(self) -> None:
        """The model's weights were changed in place: change the packs, in place too."""
        for pack in self:
            if pack.weight is not None and not pack.format:
                for old, new in zip(pack.tensors, pack.form.pack(pack.weight), strict=True):
                    old.copy_(new)
        for follower in self.followers:
            follower.refresh()

    def repacked(self, weight: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The packs of ``weight``, each with what it has to become where the weight becomes ``value``, of the same
        shape and strides."""
        return [
            pair
            for pack in self
            if pack.weight is not None and not pack.format and _same_tensor(pack.weight, weight)
            for pair in zip(pack.tensors, pack.form.pack(value), strict=True)
        ]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """What was packed and is still there, by path."""
        return {path: pack.weight for path, pack in self._packs.items() if pack.weight is not None and not pack.format}

    @property
    def rounds(self) -> bool:
        """Whether a packed weight is rounded."""
        return any(pack.form.rounds for pack in self)

    @property
    def nbytes(self) -> int:
        """Bytes of all packs."""
        return sum(pack.nbytes for pack in self)

    def items(self) -> Iterator[tuple[str, Pack]]:
        """Names of the weights and their packs."""
        yield from self._packs.items()

    def __iter__(self) -> Iterator[Pack]:
        return iter(self._packs.values())

    def __len__(self) -> int:
        return len(self._packs)

    def describe(self) -> str:
        """``210 rounded to int4 in groups of 32, 1 rounded to int8 in groups of 64``."""
        counts: dict[str, int] = {}
        for pack in self:
            counts[pack.description] = counts.get(pack.description, 0) + 1
        return ", ".join(f"{count} {description}" for description, count in counts.items())


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())

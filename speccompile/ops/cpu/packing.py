"""Packed weights, kept equal to the model's own, or to what these are rounded to."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.utils.weight_forms import WeightForms

if TYPE_CHECKING:
    from speccompile.ops.cpu.free_originals import FreedOriginals
    from speccompile.ops.cpu.quantized import QuantizedPacks

PACKED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Pack:
    """A packed weight ``[features, depth]``, or one of experts, ``[experts, features, depth]``.

    Args:
        tensors: what stands for it, see :class:`~speccompile.ops.cpu.forms.base.Form`.
        weight: the model's, or a transposed view of that; None once it is freed.
        of_vocabulary: it is an embedding's or an lm_head's.
        is_table: only an embedding reads it, so no inputs exist that a calibration could weigh.
        format: of the checkpoint whose integers it holds; empty where ``weight`` was packed.
        order: int64 ``[depth]``, the input that each of its columns is multiplied with; None: all in their order.
        stand_in: substitute that the model reads within :func:`~speccompile.ops.cpu.free_originals.standing_in`, once a
            rounded weight is freed.
        importance: of its inputs, float32 ``[depth]``, if rounding uses it.
        experts: how many matrices it has, one packed after another; None: it is one matrix.
        transposed: whether the model's weight has the last two dimensions in the other order.
    """

    form: Form
    tensors: tuple[torch.Tensor, ...]
    features: int
    depth: int
    weight: torch.Tensor | None
    of_vocabulary: bool = False
    is_table: bool = False
    format: str = ""
    order: torch.Tensor | None = None
    stand_in: torch.Tensor | None = None
    importance: torch.Tensor | None = None
    experts: int | None = None
    transposed: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        matrix = self.features, self.depth
        return matrix if self.experts is None else (self.experts, *matrix)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def description(self) -> str:
        """For ``explain()``, after a number of weights."""
        if self.format:
            return f"of {self.format} in {self.form.name}"
        return self.form.description + (", calibrated" if self.importance is not None else "")

    def packed(self, value: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Contents of :attr:`tensors` for another ``value`` of the weight."""
        return _pack(self.form, value, self.importance)

    def matrices(self) -> Iterator[Pack]:
        """The pack of each expert; itself if it is one matrix."""
        if self.experts is None:
            yield self
            return
        parts = zip(*(tensor.chunk(self.experts) for tensor in self.tensors), strict=True)
        weights = itertools.repeat(None) if self.weight is None else self.weight
        for tensors, weight in zip(parts, weights, strict=False):
            yield replace(self, tensors=tensors, weight=weight, stand_in=None, experts=None)

    def unpack(self) -> torch.Tensor:
        """The values that the ops multiply with, of the shape :attr:`shape`."""
        if self.experts is None:
            return self.form.unpack(self.tensors, self.features, self.depth)
        return torch.stack([matrix.unpack() for matrix in self.matrices()])

    def unpacked_original(self, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """The weight as the model has it: of ``dtype``, and of ``shape``, which may have all experts in one matrix."""
        values = self.dequantized().to(dtype)
        return (values.mT.contiguous() if self.transposed else values).reshape(shape)

    def ordered(self, x: torch.Tensor) -> torch.Tensor:
        """Inputs ``[..., depth]`` as the ops read them."""
        return x if self.order is None else x.index_select(-1, self.order)

    def dequantized(self) -> torch.Tensor:
        """The weight over inputs in their own order."""
        return self.unpack() if self.order is None else self.unpack()[..., self.order.argsort()]


class WeightPacks:
    """The packed weights of a wrap: each one once, for all tiers and prefill.

    With ``freed`` they are to become the model's own. ``followers`` are packs of a drafter, whose weights may be the
    same ones, and then the packs are. ``names`` are all names of a weight by each of them, where it has several.
    ``quantized`` are packed already. ``importance`` is that of a calibration, by a name of the weight. ``packed`` is
    called with the name and the pack of each weight that was packed.
    """

    def __init__(
        self,
        forms: WeightForms | None = None,
        freed: FreedOriginals | None = None,
        names: Mapping[str, Sequence[str]] | None = None,
        quantized: QuantizedPacks | None = None,
        importance: Mapping[str, torch.Tensor] | None = None,
        packed: Callable[[str, Pack], None] | None = None,
    ) -> None:
        self.forms = WeightForms() if forms is None else forms
        self.freed = freed
        self.quantized = quantized
        self.followers: list[WeightPacks] = []
        #: Shapes of tables of the tokens that have no pack, since their form does not round, by path.
        self.tables: dict[str, tuple[int, int]] = {}
        self._names = {} if names is None else names
        self._importance = importance
        self._packed = packed
        self._packs: dict[str, Pack] = {}
        #: Names of ``forms`` that decided on a weight.
        self._keys_used: set[str] = set()
        #: Calls that replace the rounded weights by their packs.
        self._to_take: list[Callable[[], None]] = []

    def of(
        self,
        path: str,
        weight: torch.Tensor,
        *,
        of_vocabulary: bool = False,
        is_table: bool = False,
        is_router: bool = False,
        transposed: bool = False,
    ) -> Pack:
        """The pack of ``weight``, which is the model's or a transposed view of that: ``[N, K]``, or ``[E, N, K]`` of
        experts.

        Args:
            of_vocabulary: it is an embedding's or an lm_head's.
            is_table: only an embedding reads it.
            is_router: it chooses among experts.
            transposed: the model's has the last two dimensions in the other order.
        """
        if path not in self._packs and (quantized := self.find_quantized(weight)) is not None:
            self._packs[path] = quantized
        if path not in self._packs:
            form = self.form_of(path, of_vocabulary=of_vocabulary, is_router=is_router)
            experts = weight.shape[0] if weight.dim() == 3 else None
            # Calibrations have the inputs of linears.
            weighted = form.calibrated and not is_table and experts is None
            importance = self._importance_of(path) if weighted else None
            tensors = self._known(weight, form) if importance is None else None
            features, depth = weight.shape[-2:]
            own = None if self.freed and not form.rounds else weight
            self._packs[path] = Pack(
                form,
                tensors or _pack(form, weight, importance),
                features,
                depth,
                own,
                of_vocabulary,
                is_table,
                importance=importance,
                experts=experts,
                transposed=transposed,
            )
            if self._packed is not None:
                self._packed(path, self._packs[path])
        return self._packs[path]

    def form_of(self, path: str, *, of_vocabulary: bool, is_router: bool = False) -> Form:
        """The form that the options give the weight at ``path``."""
        modules = self._modules_of(path)
        key = self.forms.key(modules)
        if key is not None:
            chosen = dict(self.forms.modules)
            # Both names of a tied weight may have the same form.
            self._keys_used |= {name for name in self.forms.keys(modules) if chosen[name] == chosen[key]}
        return FORMS[self.forms.form(modules, of_vocabulary=of_vocabulary, is_router=is_router)]

    def named_form(self, path: str) -> Form | None:
        """The form that a name in the options gives the weight at ``path``; None: no name matches it."""
        if self.forms.key(self._modules_of(path)) is None:
            return None
        return self.form_of(path, of_vocabulary=False)

    def find_quantized(self, weight: torch.Tensor) -> Pack | None:
        """The pack of a quantised checkpoint that stands for ``weight``."""
        return None if self.quantized is None else self.quantized.find(weight)

    def names_of(self, path: str) -> Sequence[str]:
        """All names of the weight that has the name ``path``."""
        return self._names.get(path, (path,))

    def _modules_of(self, path: str) -> list[str]:
        return [name.rpartition(".")[0] for name in self.names_of(path)]

    def _importance_of(self, path: str) -> torch.Tensor | None:
        known = self._importance or {}
        return next((known[name] for name in self.names_of(path) if name in known), None)

    def replace_original(self, path: str, release: Callable[[], None]) -> None:
        """Let the pack replace the model's weight at ``path``, at once, or in :meth:`replace_rounded_originals`.

        ``release`` drops the caller's reference to it.
        """
        take = partial(self._take, path, release)
        if self._packs[path].form.rounds:
            self._to_take.append(take)
        else:
            take()

    def replace_rounded_originals(self) -> None:
        """Let the packs replace rounded weights, once nothing is compared with the model's own any more."""
        while self._to_take:
            self._to_take.pop()()

    def _take(self, path: str, release: Callable[[], None]) -> None:
        pack = self._packs[path]
        assert self.freed is not None
        stand_in = self.freed.take(path, pack)
        self._packs[path] = replace(pack, weight=None, stand_in=stand_in)
        release()

    def unused_names(self) -> list[str]:
        """Names of modules in the options that decided the form of no packed weight."""
        return [name for name, _ in self.forms.modules if name not in self._keys_used]

    def deciding_name(self, name: str) -> str | None:
        """The name whose form a packed weight has that ``name`` matches as well; None: it matches none."""
        return next((self.forms.key(self._modules_of(path)) for path, _ in self._matched(name)), None)

    def stored_format(self, name: str) -> str:
        """The format of the checkpoint that has the weights which ``name`` matches; empty: it has none of them."""
        return next((pack.format for _, pack in self._matched(name) if pack.format), "")

    def _matched(self, name: str) -> Iterator[tuple[str, Pack]]:
        return ((path, pack) for path, pack in self.items() if name in self.forms.keys(self._modules_of(path)))

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
                for old, new in zip(pack.tensors, pack.packed(pack.weight), strict=True):
                    old.copy_(new)
        for follower in self.followers:
            follower.refresh()

    def repacked(self, weight: torch.Tensor, value: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Tensors of the packs of ``weight``, each with its new contents for a weight of ``value``, which has the same
        shape and strides.
        """
        return [
            pair
            for pack in self
            if pack.weight is not None and not pack.format and _same_tensor(pack.weight, weight)
            for pair in zip(pack.tensors, pack.packed(value), strict=True)
        ]

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """Weights that were packed and that the model still holds, by path."""
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


def _pack(form: Form, weight: torch.Tensor, importance: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    if weight.dim() == 3:
        parts = [form.pack(matrix) for matrix in weight]
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))
    return form.pack(weight) if importance is None else form.pack_for_inputs(weight, importance)


def _same_tensor(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.shape, one.stride()) == (other.data_ptr(), other.shape, other.stride())

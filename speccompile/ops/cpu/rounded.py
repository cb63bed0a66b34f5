"""The model's own forward, computed with the rounded weights that its executables read."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from speccompile.errors import LoweringError
from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.forms.base import COLUMNS
from speccompile.ops.cpu.forms.int8 import quantise
from speccompile.ops.cpu.free_originals import standing_in
from speccompile.ops.cpu.packing import Pack, WeightPacks
from speccompile.ops.fused_linears import linear_input
from speccompile.utils.product_linear import product_linear
from speccompile.utils.torch_private import TorchDispatchMode, without_modes

#: Largest distance of a kernel from its definition, as a share of the largest output.
KERNEL_TOLERANCE = 1e-4

#: Rounded parts that an input is the sum of, to the last bits of float32: each is less than a 250th of the one before.
PARTS = 3

#: Outputs of a weight that are unpacked at a time, a multiple of :data:`COLUMNS`: few enough that they stay in a cache.
CHECKED = 512

ops = torch.ops.speccompile


class Products(Protocol):
    """The computation of products with packed weights."""

    def linear(self, x: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of ``x`` ``[..., K]`` and a matrix."""

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        """The product of each token and its experts, as ``speccompile::expert_linear`` returns it."""


@contextlib.contextmanager
def as_packed(packs: WeightPacks) -> Iterator[None]:
    """Within it, the model computes what the packs do: what it would with rounded weights and inputs."""
    if not packs.rounds:
        yield
        return
    with _OverPacks(packs, _Packed()), standing_in():
        yield


@contextlib.contextmanager
def reading_packs(packs: Iterable[Pack]) -> Iterator[None]:
    """Within it, a model multiplies with the weights that are only in ``packs``. Without it, results would be NaN."""
    with _OverPacks(packs, _Packed()):
        yield


@contextlib.contextmanager
def inputs_unrounded(packs: WeightPacks) -> Iterator[None]:
    """Within it, the model and graphs that read the packs round weights but not inputs.

    Rounding of inputs amplifies differences in the last bits: a number close to the border between two integers may
    round to either, and some layers later this has reached all numbers. The logits of two correct forwards of SmolLM2
    whose embeddings differ by a ten-millionth are as distant from each other as from those of the model without
    rounding. Without rounded inputs both forwards are smooth, and can be compared as strictly as any model's.
    """
    if not packs.rounds:
        yield
        return
    with _OverPacks(packs, _Unrounded()), _UnroundedOps():
        yield


def check_kernels(packs: WeightPacks) -> None:
    """Check rounding itself, weight by weight: the part that :func:`inputs_unrounded` leaves out of comparisons.

    Raises:
        LoweringError: a pack is not its weight, rounded, or the op over it computes something else.
    """
    for path, pack in packs.items():
        check_pack(path, pack)


def check_pack(path: str, pack: Pack) -> None:
    """Check the rounding of one weight. Some of its outputs are unpacked at a time.

    Raises:
        LoweringError: as :func:`check_kernels`.
    """
    if not pack.form.rounds:
        return
    x = torch.randn((2, pack.depth), generator=torch.Generator().manual_seed(0)).to(pack.tensors[0].device)
    numbers, units = quantise(pack.ordered(x))
    read = (numbers * units[..., None]).flatten(1)[:, : pack.depth]
    joined = pack.form.joined
    differences, sizes = [], []
    distance = size = 0.0
    for product, matrix in zip(_products(x, pack), pack.matrices(), strict=True):
        for first in range(0, pack.features, CHECKED):
            last = min(first + CHECKED, pack.features)
            part = tuple(tensor[first // COLUMNS : -(-last // COLUMNS)] for tensor in matrix.tensors)
            values = pack.form.unpack(part, last - first, pack.depth)
            if matrix.weight is not None and not pack.format:
                more, larger = pack.form.distance(matrix.weight[first:last], values)
                distance, size = joined(distance, more), joined(size, larger)
            expected = F.linear(read, values)
            differences.append((product[:, first:last] - expected).abs().max())
            sizes.append(expected.abs().max())
    if not pack.form.holds(distance, size):
        reason = f"{path} is not what its {pack.form.name} pack holds; wrap with weights='same'"
        raise LoweringError(reason, pack=path)
    difference = float(torch.stack(differences).max())
    if not difference <= KERNEL_TOLERANCE * float(torch.stack(sizes).max()):
        raise LoweringError(
            f"the {pack.form.name} linear over {path} is wrong by {difference:.3g} on this machine; wrap with "
            "weights='same'",
            linear=path,
            difference=difference,
        )


def _products(x: torch.Tensor, pack: Pack) -> Iterable[torch.Tensor]:
    """The product of ``x`` ``[P, K]`` and each matrix of ``pack``, by the op that steps call."""
    if pack.experts is None:
        return [_Packed().linear(x, pack, None)]
    every = torch.arange(pack.experts, device=x.device).expand(x.shape[0], -1).contiguous()
    return _Packed().experts(x, every, pack, None).unbind(1)


class _Packed:
    """Products by the ops, which round inputs."""

    def linear(self, x: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = pack.form.linear(pack.ordered(x), *pack.tensors, bias, pack.features)
        return product

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        product: torch.Tensor = pack.form.expert_linear(pack.ordered(x), chosen, *pack.tensors, bias, pack.features)
        return product


class _Unrounded:
    """Products with inputs as they are."""

    def linear(self, x: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        # The model calls the ops themselves, whatever becomes of those that a graph calls.
        with without_modes():
            return _unrounded_linear(pack.form, pack.ordered(x), pack.tensors, bias, pack.features)

    def experts(self, x: torch.Tensor, chosen: torch.Tensor, pack: Pack, bias: torch.Tensor | None) -> torch.Tensor:
        with without_modes():
            return _unrounded_experts(pack.form, pack.ordered(x), chosen, pack.tensors, bias, pack.features)


def _unrounded_linear(
    form: Form, x: torch.Tensor, tensors: Sequence[torch.Tensor], bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    product = _unrounded(x, lambda part: form.linear(part, *tensors, None, features))
    return (product if bias is None else product + bias).to(x.dtype)


def _unrounded_experts(
    form: Form,
    x: torch.Tensor,
    chosen: torch.Tensor,
    tensors: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    features: int,
) -> torch.Tensor:
    product = _unrounded(x, lambda part: form.expert_linear(part, chosen, *tensors, None, features))
    if bias is not None:
        # An expert that is the number of experts or more has no weights, and no bias.
        product += torch.where((chosen < len(bias))[..., None], bias[chosen.clamp(max=len(bias) - 1)], 0)
    return product.to(x.dtype)


def _unrounded(x: torch.Tensor, product: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """The sum of an op over the rounded input and over the rounding errors that remain. Unpacking all weights for each
    forward would be nearly all of the time of a wrap.
    """
    rest, parts = x.float(), []
    for _ in range(PARTS):
        parts.append(product(rest))
        numbers, units = quantise(rest.flatten(0, -2))
        rest = rest - (numbers * units[..., None]).flatten(1)[:, : x.shape[-1]].view(rest.shape)
    return functools.reduce(torch.add, parts)


def _unrounded_linears(
    form: Form, x: torch.Tensor, lists: Sequence[Any], biases: Sequence[torch.Tensor], features: Sequence[int]
) -> list[torch.Tensor]:
    given: Sequence[torch.Tensor | None] = biases or [None] * len(features)
    return [
        _unrounded_linear(form, x, tensors, bias, count)
        for tensors, bias, count in zip(zip(*lists, strict=True), given, features, strict=True)
    ]


class _OverPacks(TorchFunctionMode):
    """Mode in which the model's products with weights that have rounded packs are computed by ``products``."""

    def __init__(self, packs: Iterable[Pack], products: Products) -> None:
        super().__init__()
        self._linear, self._experts = products.linear, products.experts
        read = ((pack.stand_in if pack.weight is None else pack.weight, pack) for pack in packs if pack.form.rounds)
        self._packs = {weight.data_ptr(): pack for weight, pack in read if weight is not None}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and (pack := self._packs.get(args[1].data_ptr())):
            return self._linear(args[0], pack, args[2] if len(args) > 2 else kwargs.get("bias"))
        if func is F.embedding and (pack := self._packs.get(args[1].data_ptr())):
            return pack.form.embedding(*pack.tensors, args[0], pack.depth).to(args[1].dtype)
        # A GPT-2 linear.
        if func is torch.addmm and (pack := self._packs.get(args[2].data_ptr())):
            return self._linear(args[1], pack, args[0])
        if (linear := product_linear(func, args)) and (pack := self._packs.get(linear.weight.data_ptr())):
            product = self._linear(linear.x, pack, None)
            return product.transpose(1, 2) if linear.columns else product
        if func is ops.expert_linear and (pack := self._packs.get(args[2].data_ptr())):
            return self._experts(args[0], args[1], pack, args[3])
        return func(*args, **kwargs)


class _UnroundedOps(TorchDispatchMode):
    """Graphs call the ops, compiled or not."""

    def __init__(self) -> None:
        super().__init__()
        rounding = [form for form in FORMS.values() if form.rounds]
        self._linear = {form.linear: form for form in rounding}
        self._linears = {form.linears: form for form in rounding}
        self._fused = {form.fused: form for form in rounding}
        self._experts = {form.expert_linear: form for form in rounding}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if form := self._linear.get(func):  # type: ignore[call-overload]
            x, *tensors, bias, features = args
            return _unrounded_linear(form, x, tensors, bias, features)
        if form := self._experts.get(func):  # type: ignore[call-overload]
            x, chosen, *tensors, bias, features = args
            return _unrounded_experts(form, x, chosen, tensors, bias, features)
        if form := self._linears.get(func):  # type: ignore[call-overload]
            x, *lists, biases, features = args
            return _unrounded_linears(form, x, lists, biases, features)
        if form := self._fused.get(func):  # type: ignore[call-overload]
            x, gate, activation, norm, eps, offset, residual, *lists, biases, features = args
            x = linear_input(x, gate, activation, norm, eps, offset)
            outputs = _unrounded_linears(form, x, lists, biases, features)
            return outputs if residual is None else [residual + output for output in outputs]
        return func(*args, **(kwargs or {}))

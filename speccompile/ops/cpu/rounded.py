"""The model's own forward, computed with the int8 weights that its executables read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.errors import LoweringError
from speccompile.ops.cpu.packing import WeightPacks, quantise, unpack_int8
from speccompile.utils.torch_private import TorchDispatchMode

ops = torch.ops.speccompile

#: How far a kernel may be from what it is defined as, as a share of the largest output.
KERNEL_TOLERANCE = 1e-4

Linear = Callable[..., torch.Tensor]


def as_packed(packs: WeightPacks) -> contextlib.AbstractContextManager[object]:
    """Within it, the model computes what the packs do: for int8, what it would with rounded weights and inputs."""
    return _OverPacks(packs, ops.int8_linear) if packs.form == "int8" else contextlib.nullcontext()


@contextlib.contextmanager
def inputs_unrounded(packs: WeightPacks) -> Iterator[None]:
    """Within it, the model and graphs that read the packs round weights alone, inputs not.

    Rounded inputs make chaos of the last bits: a number that is almost undecided goes to either side, and some layers
    later all of them have. Two correct forwards of SmolLM2 whose embeddings differ by a ten-millionth have logits as
    far from each other as from those of the model that is not rounded at all. Without this one step both are smooth
    again, and can be compared as strictly as any model's.
    """
    if packs.form != "int8":
        yield
        return
    with _OverPacks(packs, _unrounded_linear), _UnroundedOps():
        yield


def check_kernels(packs: WeightPacks) -> None:
    """The other half of what :func:`inputs_unrounded` lets be compared: rounding itself, weight by weight.

    Raises:
        LoweringError: a pack is not its weight, rounded, or the op over it computes something else.
    """
    if packs.form != "int8":
        return
    generator = torch.Generator().manual_seed(0)
    for path, weight in packs.weights.items():
        packed, scales = packs.of(path, weight)
        features, depth = weight.shape
        rounded = unpack_int8(packed, scales, features, depth)
        unit = float(scales.max())
        if not float((rounded - weight).abs().max()) <= 0.51 * unit:
            raise LoweringError(f"{path} is not what its int8 pack holds; wrap with weights='same'", pack=path)
        x = torch.randn((2, depth), generator=generator)
        numbers, units = quantise(x)
        expected = F.linear((numbers * units[..., None]).flatten(1)[:, :depth], rounded)
        difference = float((ops.int8_linear(x, packed, scales, None, features) - expected).abs().max())
        if not difference <= KERNEL_TOLERANCE * float(expected.abs().max()):
            raise LoweringError(
                f"the int8 linear over {path} is wrong by {difference:.3g} on this machine; wrap with weights='same'",
                linear=path,
                difference=difference,
            )


def _unrounded_linear(
    x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None, features: int
) -> torch.Tensor:
    product = F.linear(x.float(), unpack_int8(packed, scales, features, x.shape[-1]))
    return (product if bias is None else product + bias.float()).to(x.dtype)


class _OverPacks(TorchFunctionMode):
    """What the model computes over weights that have packs, it computes by ``linear`` over those."""

    def __init__(self, packs: WeightPacks, linear: Linear) -> None:
        super().__init__()
        self._linear = linear
        self._packs = {weight.data_ptr(): packs.of(path, weight) for path, weight in packs.weights.items()}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear and args[1].data_ptr() in self._packs:
            x, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
            return self._linear(x, *self._packs[weight.data_ptr()], bias, weight.shape[0])
        if func is F.embedding and args[1].data_ptr() in self._packs:
            ids, weight = args[:2]
            return ops.int8_embedding(*self._packs[weight.data_ptr()], ids, weight.shape[1]).to(weight.dtype)
        # A GPT-2 linear.
        if func is torch.addmm and args[2].data_ptr() in self._packs:
            bias, x, weight = args
            return self._linear(x, *self._packs[weight.data_ptr()], bias, weight.shape[1])
        return func(*args, **kwargs)


class _UnroundedOps(TorchDispatchMode):
    """Graphs call the ops, compiled or not."""

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is ops.int8_linear.default:
            return _unrounded_linear(*args)
        if func is ops.int8_linears.default:
            x, packed, scales, biases, features = args
            given = biases or [None] * len(packed)
            return [_unrounded_linear(x, *each) for each in zip(packed, scales, given, features, strict=True)]
        return func(*args, **(kwargs or {}))

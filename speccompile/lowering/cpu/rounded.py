"""The model's own forward, computed with the rounded weights that its executables read."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

import speccompile.lowering.ops.native  # noqa: F401  defines the ops
from speccompile.lowering.cpu.packing import WeightPacks

ops = torch.ops.speccompile


def as_packed(packs: WeightPacks) -> contextlib.AbstractContextManager[object]:
    """Within it, the model computes what the packs do: for int8, what it would with rounded weights and inputs."""
    return _RoundedForward(packs) if packs.form == "int8" else contextlib.nullcontext()


class _RoundedForward(TorchFunctionMode):
    def __init__(self, packs: WeightPacks) -> None:
        super().__init__()
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
            return ops.int8_linear(x, *self._packs[weight.data_ptr()], bias, weight.shape[0])
        if func is F.embedding and args[1].data_ptr() in self._packs:
            ids, weight = args[:2]
            return ops.int8_embedding(*self._packs[weight.data_ptr()], ids, weight.shape[1]).to(weight.dtype)
        # A GPT-2 linear.
        if func is torch.addmm and args[2].data_ptr() in self._packs:
            bias, x, weight = args
            return ops.int8_linear(x, *self._packs[weight.data_ptr()], bias, weight.shape[1])
        return func(*args, **kwargs)

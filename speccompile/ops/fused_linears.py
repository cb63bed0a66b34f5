"""Linears of one input as one op with what is computed around them: a norm or a gate before, a residual after.

The C++ kernel prepares and rounds each row of the input, and adds the residual to the outputs that a thread has just
computed (``ops/cpu/csrc/base/kernels/linear_ends.cpp``).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.native import ROUNDED

#: Activations of a gate, by name.
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}

_ENDS = "Tensor x, Tensor? gate, str activation, Tensor? norm, float eps, float offset, Tensor? residual"


def linear_input(
    x: torch.Tensor,
    gate: torch.Tensor | None = None,
    activation: str = "",
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    offset: float = 0.0,
) -> torch.Tensor:
    """Compute the input of the linears of a fused op: ``[..., K]``, of the dtype of ``x``.

    Args:
        x: ``[..., K]``.
        gate: ``[..., K]``, of the same dtype: the input is ``activation(gate) * x``.
        activation: a name in :data:`ACTIVATIONS`; without ``gate`` an empty string.
        norm: ``[K]``, of the same dtype: the input is ``x / sqrt(mean(x^2) + eps)``, times ``norm`` as in Llama, or
            times ``offset + norm`` as in Gemma, which rounds only the result to the dtype.
    """
    if gate is not None:
        return ACTIVATIONS[activation](gate) * x
    if norm is None:
        return x
    wide = x.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if offset == 0:
        return norm * scaled.to(x.dtype)
    return (scaled * (offset + norm.float())).to(x.dtype)


def _prepare_fake(x, *rest):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape)


def _join_fake(a, norm_a, b, *rest):  # type: ignore[no-untyped-def]
    return a.new_empty((*a.shape[:-1], a.shape[-1] + b.shape[-1]))


def _fake(x, *rest):  # type: ignore[no-untyped-def]
    return [x.new_empty((*x.shape[:-1], count)) for count in rest[-1]]


def _define(form: str, tensors: str, **options: Any) -> None:
    define(
        f"fused_{form}_linears({_ENDS}, {tensors}, Tensor[] biases, int[] features) -> Tensor[]",
        _fake,
        in_bodies=True,
        recorded=True,
        **options,
    )


#: :func:`linear_input` as an op, with the bits that fused linears multiply.
define(
    "prepare_rows(Tensor x, Tensor? gate, str activation, Tensor? norm, float eps, float offset) -> Tensor",
    _prepare_fake,
    cpp=BASE,
    in_bodies=True,
    recorded=True,
)
#: Two of these side by side, ``[..., Ka + Kb]``: the first layer of a draft head reads an embedding and a hidden state.
define(
    "join_rows(Tensor a, Tensor norm_a, Tensor b, Tensor norm_b, float eps, float offset) -> Tensor",
    _join_fake,
    cpp=BASE,
    in_bodies=True,
    recorded=True,
)
_define("packed", "Tensor[] packed", cpp=BASE)
for _form in ROUNDED:
    _define(_form, "Tensor[] packed, Tensor[] scales", cpp="rounded")

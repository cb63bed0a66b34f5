"""The C++ ops as graphs see them. What they compute is fixed for each row: its result has the same bits with any
other rows beside it. Kernels: ``ops/cpu/csrc/base/kernels``, ``ops/cpu/csrc/rounded``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from speccompile.ops.attention import SCHEMA
from speccompile.ops.in_cpp import in_cpp
from speccompile.ops.on_cuda import register_on_cuda

#: Forms of weights that are rounded, and that have the ops ``{form}_linear``, ``{form}_linears``, ``{form}_embedding``.
ROUNDED = ("int8", "int4")

_library = torch.library.Library("speccompile", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias, int features) -> Tensor")
_library.define("packed_embedding(Tensor packed, Tensor ids) -> Tensor")
_library.define("packed_linears(Tensor x, Tensor[] packed, Tensor[] biases, int[] features) -> Tensor[]")
for _form in ROUNDED:
    _library.define(f"{_form}_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int features) -> Tensor")
    _library.define(
        f"{_form}_linears(Tensor x, Tensor[] packed, Tensor[] scales, Tensor[] biases, int[] features) -> Tensor[]"
    )
    _library.define(f"{_form}_embedding(Tensor packed, Tensor scales, Tensor ids, int depth) -> Tensor")
_library.define("native_attention" + SCHEMA)
_library.define(
    "choose_nearly(Tensor scores, Tensor? temperature, Tensor? seed, Tensor? positions, int stream, Tensor? start, "
    "bool forbids, int first_id=0) -> (Tensor, Tensor)"
)


def _packed_linear(x, packed, bias, features):  # type: ignore[no-untyped-def]
    """``x [..., K]`` times the weight ``[features, K]``, and bias; ``packed`` is ``[ceil(features / 32), K, 32]``."""
    return x.new_empty((*x.shape[:-1], features))


def _packed_embedding(packed, ids):  # type: ignore[no-untyped-def]
    """Rows ``ids`` (int64, ``[...]``) of the weight that ``packed [ceil(V / 32), M, 32]`` holds: ``[..., M]``."""
    return packed.new_empty((*ids.shape, packed.shape[1]))


def _rounded_linear(x, packed, scales, bias, features):  # type: ignore[no-untyped-def]
    """``packed_linear`` over a rounded weight; inputs are rounded row by row, to int8 in groups of 64.

    With ``int8``, ``packed`` is int8 ``[ceil(features / 32), 16 * groups, 32, 4]``, and ``scales`` are float32
    ``[ceil(features / 32), groups, 32]``. With ``int4``, ``packed`` is uint8 ``[ceil(features / 32), 16 * groups, 16,
    4]`` (numbers plus 8, those of columns 16 to 31 in the high halves), and ``scales`` are float16 ``[ceil(features /
    32), 2 * groups, 32]``, one for each 32 inputs.
    """
    return x.new_empty((*x.shape[:-1], features))


def _rounded_embedding(packed, scales, ids, depth):  # type: ignore[no-untyped-def]
    """Rows ``ids`` of the same weight, in float32: ``[..., depth]``."""
    return scales.new_empty((*ids.shape, depth), dtype=torch.float32)


def _packed_linears(x, packed, biases, features):  # type: ignore[no-untyped-def]
    """Several ``packed_linear`` of one ``x``; ``biases`` are one for each, or none."""
    return [x.new_empty((*x.shape[:-1], count)) for count in features]


def _rounded_linears(x, packed, scales, biases, features):  # type: ignore[no-untyped-def]
    """Several linears over rounded weights of one form, of one ``x``, which is rounded once."""
    return [x.new_empty((*x.shape[:-1], count)) for count in features]


def _native_attention(q, k_cache, v_cache, *rest, **options):  # type: ignore[no-untyped-def]
    """See ``speccompile::attention``."""
    return q.new_empty((*q.shape[:3], v_cache.shape[3]))


def _choose_nearly(scores, *rest):  # type: ignore[no-untyped-def]
    """See ``speccompile::choose``: tokens ``[B, T]``, and bool ``[B, T]``, whether another one is as good but for
    rounding of the noise."""
    return scores.new_empty(scores.shape[:2], dtype=torch.int64), scores.new_empty(scores.shape[:2], dtype=torch.bool)


_FAKES: dict[str, Callable[..., Any]] = {
    "packed_linear": _packed_linear,
    "packed_embedding": _packed_embedding,
    "packed_linears": _packed_linears,
    **{f"{form}_linear": _rounded_linear for form in ROUNDED},
    **{f"{form}_linears": _rounded_linears for form in ROUNDED},
    **{f"{form}_embedding": _rounded_embedding for form in ROUNDED},
    "native_attention": _native_attention,
    "choose_nearly": _choose_nearly,
}
for _name, _fake in _FAKES.items():
    torch.library.register_fake(f"speccompile::{_name}", _fake, lib=_library)
    in_cpp(_name, "rounded" if _name.startswith(ROUNDED) else "base")


for _form in ROUNDED:
    register_on_cuda(_library, f"{_form}_linear", "rounded_linear.rounded_linear")
    register_on_cuda(_library, f"{_form}_linears", "rounded_linear.rounded_linears")
    register_on_cuda(_library, f"{_form}_embedding", "rounded_linear.rounded_embedding")

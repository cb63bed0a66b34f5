"""The C++ ops as graphs see them. What they compute is fixed for each row: its result has the same bits with any
other rows beside it. Kernels: ``ops/cpu/csrc/base/kernels``, ``ops/cpu/csrc/rounded``."""

from __future__ import annotations

import torch

from speccompile.ops.attention import SCHEMA
from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.kv_rows import features_of
from speccompile.ops.on_cuda import in_triton

#: Forms of weights that are rounded, and that have the ops ``{form}_linear``, ``{form}_linears``, ``{form}_embedding``,
#: ``{form}_expert_linear``.
ROUNDED = ("int8", "int4", "fp4")


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
    32), 2 * groups, 32]``, one for each 32 inputs. ``fp4`` has the layout of ``int4``; four bits are an index of
    :data:`~speccompile.utils.fp4.NUMBERS`.
    """
    return x.new_empty((*x.shape[:-1], features))


def _rounded_embedding(packed, scales, ids, depth):  # type: ignore[no-untyped-def]
    """Rows ``ids`` of the same weight, in float32: ``[..., depth]``."""
    return scales.new_empty((*ids.shape, depth), dtype=torch.float32)


def _rounded_expert_linear(x, experts, packed, scales, bias, features):  # type: ignore[no-untyped-def]
    """``speccompile::expert_linear`` over rounded weights: E matrices ``[features, K]``, each packed as one of a
    ``linear`` is, one after another."""
    return x.new_empty((*experts.shape, features))


def _packed_linears(x, packed, biases, features):  # type: ignore[no-untyped-def]
    """Several ``packed_linear`` of one ``x``; ``biases`` are one for each, or none."""
    return [x.new_empty((*x.shape[:-1], count)) for count in features]


def _rounded_linears(x, packed, scales, biases, features):  # type: ignore[no-untyped-def]
    """Several linears over rounded weights of one form, of one ``x``, which is rounded once."""
    return [x.new_empty((*x.shape[:-1], count)) for count in features]


def _native_attention(q, k_cache, v_cache, *rest, **options):  # type: ignore[no-untyped-def]
    """See ``speccompile::attention``."""
    return q.new_empty((*q.shape[:3], features_of(v_cache)))


define(
    "packed_linear(Tensor x, Tensor packed, Tensor? bias, int features) -> Tensor",
    _packed_linear,
    cpp=BASE,
    in_bodies=True,
    recorded=True,
)
define("packed_embedding(Tensor packed, Tensor ids) -> Tensor", _packed_embedding, cpp=BASE, recorded=True)
define(
    "packed_linears(Tensor x, Tensor[] packed, Tensor[] biases, int[] features) -> Tensor[]",
    _packed_linears,
    cpp=BASE,
    in_bodies=True,
    recorded=True,
)
for _form in ROUNDED:
    define(
        f"{_form}_linear(Tensor x, Tensor packed, Tensor scales, Tensor? bias, int features) -> Tensor",
        _rounded_linear,
        cpp="rounded",
        in_bodies=True,
        recorded=True,
        cuda=in_triton("rounded_linear.rounded_linear", coded=_form == "fp4"),
    )
    define(
        f"{_form}_linears(Tensor x, Tensor[] packed, Tensor[] scales, Tensor[] biases, int[] features) -> Tensor[]",
        _rounded_linears,
        cpp="rounded",
        in_bodies=True,
        recorded=True,
        cuda=in_triton("rounded_linear.rounded_linears", coded=_form == "fp4"),
    )
    define(
        f"{_form}_embedding(Tensor packed, Tensor scales, Tensor ids, int depth) -> Tensor",
        _rounded_embedding,
        cpp="rounded",
        recorded=True,
        cuda=in_triton("rounded_linear.rounded_embedding", coded=_form == "fp4"),
    )
    define(
        f"{_form}_expert_linear(Tensor x, Tensor experts, Tensor packed, Tensor scales, Tensor? bias, int features) "
        "-> Tensor",
        _rounded_expert_linear,
        cpp="rounded",
        in_bodies=True,
    )
define("native_attention" + SCHEMA, _native_attention, cpp=BASE, in_bodies=True, recorded=True)

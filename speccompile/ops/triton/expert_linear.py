"""Linears of chosen experts on CUDA: pairs of a token and an expert are grouped by expert, then each expert's weights
are multiplied with its own pairs.

The number of programs follows from sizes only, so a CUDA graph can hold them; programs of an expert that no token chose
end at once. A tile has the same number of rows at every width, so a pair's bits depend on no other pair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all

# Pairs that a program groups at once.
GROUPED = 1024
# A tile: tl.dot needs at least 16 rows, and a step seldom has more pairs of one expert. With 64 columns, few experts
# have enough programs to keep a GPU busy.
ROWS, COLUMNS, DEPTHS = 16, 64, 64


@triton.jit(do_not_specialize=["pairs"])
def group_by_expert(experts, begin, order, pairs, EXPERTS: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Program (expert). Its pairs lie in ``order`` from ``begin[expert]`` on; those without weights are the last."""
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    earlier = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, pairs, BLOCK):
        chosen = tl.load(experts + first + lane, mask=first + lane < pairs, other=EXPERTS)
        earlier += (chosen < expert).to(tl.int32)
    place = tl.sum(earlier)
    tl.store(begin + expert, place)
    if expert == EXPERTS:
        tl.store(begin + expert + 1, pairs)
    for first in range(0, pairs, BLOCK):
        pair = first + lane
        chosen = tl.load(experts + pair, mask=pair < pairs, other=EXPERTS)
        own = (tl.minimum(chosen, EXPERTS) == expert) & (pair < pairs)
        rank = tl.cumsum(own.to(tl.int32), 0)
        tl.store(order + place + rank - 1, pair, mask=own)
        place += tl.sum(own.to(tl.int32))


@triton.jit
def multiply_by_expert(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    begin,
    order,
    out,
    EACH: tl.constexpr,
    EXPERTS: tl.constexpr,
    DEPTH: tl.constexpr,
    FEATURES: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTHS: tl.constexpr,
):
    """Program (block of outputs, expert); the expert after the last one has no weights, and zeros as its results.

    ``EACH`` pairs after one another read one input.
    """
    expert = tl.program_id(1)
    first, last = tl.load(begin + expert), tl.load(begin + expert + 1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = tl.arange(0, DEPTHS)
    has_weights = expert < EXPERTS
    depth = tl.where(has_weights, DEPTH, 0)
    weight += expert.to(tl.int64) * FEATURES * DEPTH
    for start in range(first, last, ROWS):
        row = start + tl.arange(0, ROWS)
        pair = tl.load(order + row, mask=row < last, other=0)
        inputs = x + (pair // EACH).to(tl.int64)[:, None] * DEPTH
        total = tl.zeros((ROWS, COLUMNS), tl.float32)
        for at in range(0, depth, DEPTHS):
            k = at + within
            there = (k < DEPTH)[:, None] & (column < FEATURES)[None, :]
            if TRANSPOSED:
                block = tl.load(weight + k[:, None] * FEATURES + column[None, :], mask=there, other=0.0)
            else:
                block = tl.load(weight + column[None, :] * DEPTH + k[:, None], mask=there, other=0.0)
            values = tl.load(inputs + k[None, :], mask=(row < last)[:, None] & (k < DEPTH)[None, :], other=0.0)
            total = tl.dot(values.to(block.dtype), block, total, input_precision="ieee")
        if bias is not None:
            added = tl.load(bias + expert * FEATURES + column, mask=has_weights & (column < FEATURES), other=0.0)
            total += added.to(tl.float32)[None, :]
        results = out + pair.to(tl.int64)[:, None] * FEATURES + column[None, :]
        tl.store(results, total.to(out.dtype.element_ty), mask=(row < last)[:, None] & (column < FEATURES)[None, :])


def expert_linear_launches(
    x: torch.Tensor,
    experts: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    transposed: bool,
    out: torch.Tensor,
    begin: torch.Tensor,
    order: torch.Tensor,
) -> tuple[Launch, Launch]:
    """Two launches over contiguous tensors.

    Args:
        begin: int32 ``[E + 2]``, scratch. order: int32 ``[P * k]``, scratch.
    """
    pairs, count, features = experts.numel(), weight.shape[0], out.shape[-1]
    group = Launch(
        group_by_expert,
        (count + 1,),
        {"experts": experts, "begin": begin, "order": order, "pairs": pairs, "EXPERTS": count, "BLOCK": GROUPED},
    )
    multiply = Launch(
        multiply_by_expert,
        (-(-features // COLUMNS), count + 1),
        {
            "x": x,
            "weight": weight,
            "bias": bias,
            "begin": begin,
            "order": order,
            "out": out,
            "EACH": 1 if x.dim() == 3 else experts.shape[1],
            "EXPERTS": count,
            "DEPTH": x.shape[-1],
            "FEATURES": features,
            "TRANSPOSED": transposed,
            "ROWS": ROWS,
            "COLUMNS": COLUMNS,
            "DEPTHS": DEPTHS,
        },
        stages=3,
    )
    return group, multiply


def expert_linear(
    x: torch.Tensor, experts: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, transposed: bool
) -> torch.Tensor:
    """:func:`speccompile.ops.expert_linear.reference` on CUDA. Experts are not checked: that would wait for the GPU."""
    x, experts, weight = x.contiguous(), experts.contiguous(), weight.contiguous()
    out = x.new_empty((*experts.shape, weight.shape[2 if transposed else 1]))
    begin = torch.empty(weight.shape[0] + 2, dtype=torch.int32, device=x.device)
    order = torch.empty(experts.numel(), dtype=torch.int32, device=x.device)
    bias = None if bias is None else bias.contiguous()
    run_all(expert_linear_launches(x, experts, weight, bias, transposed, out, begin, order), x)
    return out

"""The gated delta rule on CUDA: one program for each row, head and block of the state's columns.

The columns of a state do not depend on one another, so a program keeps its own in registers over all places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.recurrence import inputs_of, keep_launch, side_by_side

# Columns of a program, of a state of 128 lines. More have too many registers, fewer read the keys more often.
COLUMNS = 16


@triton.jit(do_not_specialize=["width"])
def delta_rule_columns(  # type: ignore[no-untyped-def]
    q,
    inputs,
    state,
    kept,
    out,
    slots,
    positions,
    absorbed,
    settled,
    size,
    width,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    GATES: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Program (block of columns, head, row). The state absorbs kept places, then those of the step."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    slot = tl.load(slots + row)
    first = tl.load(positions + row * width).to(tl.int32)
    start = tl.load(absorbed + row).to(tl.int32)
    end = tl.load(settled + row).to(tl.int32)
    group = head // (HEADS // GROUPS)
    line = tl.arange(0, PADDED_DIM)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    lines, columns = line < DIM, column < VALUE_DIM
    FEATURES: tl.constexpr = GROUPS * DIM + HEADS * (VALUE_DIM + GATES + 1)

    state += (slot * HEADS + head) * DIM * VALUE_DIM + line[:, None] * VALUE_DIM + column[None, :]
    there = lines[:, None] & columns[None, :]
    # After no tokens the state is zero, whatever is stored.
    now = tl.load(state, mask=there & (start > 0), other=0.0)
    stays = now
    for position in range(start, first + width):
        place = inputs_of(kept, inputs, slot, row, position, first, size, width, FEATURES)
        key = tl.load(place + group * DIM + line, mask=lines, other=0.0)
        value = tl.load(place + GROUPS * DIM + head * VALUE_DIM + column, mask=columns, other=0.0)
        gates = place + GROUPS * DIM + HEADS * VALUE_DIM
        rate = tl.load(gates + HEADS * GATES + head)
        if GATES == 1:
            now = now * tl.exp(tl.load(gates + head))
        else:
            now = now * tl.exp(tl.load(gates + head * GATES + line, mask=lines, other=0.0))[:, None]
        change = (value - tl.sum(now * key[:, None], 0)) * rate
        now += key[:, None] * change[None, :]
        # A choice, not a factor of zero: what is not settled may be NaN.
        stays = tl.where(position < end, now, stays)
        own = row * width + position - first
        query = tl.load(q + (own * GROUPS + group) * DIM + line, mask=lines & (position >= first), other=0.0)
        result = tl.sum(now * query[:, None], 0)
        tl.store(out + (own * HEADS + head) * VALUE_DIM + column, result, mask=columns & (position >= first))
    tl.store(state, stays, mask=there)


def delta_rule_launches(
    q: torch.Tensor,
    inputs: torch.Tensor,
    gates: int,
    state: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    absorbed: torch.Tensor,
    settled: torch.Tensor,
    out: torch.Tensor,
) -> tuple[Launch, Launch]:
    """Two launches over contiguous tensors: results and state, then the inputs that stay.

    Args:
        inputs: k, v, gate and beta side by side, ``[B, T, F]``. gates: numbers of a head's gate, 1 or D.
    """
    rows, width, groups, dim = q.shape
    heads, _, value_dim = state.shape[1:]
    padded = power_of_2(dim)
    columns = min(max(1, COLUMNS * 128 // padded), power_of_2(value_dim))
    scan = Launch(
        delta_rule_columns,
        (-(-value_dim // columns), heads, rows),
        {
            "q": q,
            "inputs": inputs,
            "state": state,
            "kept": kept,
            "out": out,
            "slots": slots,
            "positions": positions,
            "absorbed": absorbed,
            "settled": settled,
            "size": kept.shape[1],
            "width": width,
            "HEADS": heads,
            "GROUPS": groups,
            "DIM": dim,
            "VALUE_DIM": value_dim,
            "GATES": gates,
            "PADDED_DIM": padded,
            "COLUMNS": columns,
        },
    )
    return scan, keep_launch(inputs, kept, slots, positions, settled)


def gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    gate: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
    kept: torch.Tensor,
    *cursor: torch.Tensor,
) -> torch.Tensor:
    """:func:`speccompile.ops.gated_delta_rule.reference` on CUDA; ``state`` and ``kept`` must be contiguous."""
    q, inputs, out = q.contiguous(), side_by_side((k, v, gate, beta)), torch.empty_like(v).contiguous()
    slots, positions, absorbed, settled = (item.contiguous() for item in cursor)
    gates = gate.shape[3]
    run_all(delta_rule_launches(q, inputs, gates, state, kept, slots, positions, absorbed, settled, out), q)
    return out

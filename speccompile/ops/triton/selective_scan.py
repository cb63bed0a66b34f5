"""The selective scan on CUDA: one program for each row and block of the state's lines.

A line is one channel of one head, and does not depend on others: a program keeps its own in registers over all places.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.recurrence import inputs_of, keep_launch, side_by_side

# Numbers of the state that a program keeps.
NUMBERS = 2048


@triton.jit(do_not_specialize=["width"])
def scan_lines(  # type: ignore[no-untyped-def]
    inputs,
    A,
    C,
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
    DEPTH: tl.constexpr,
    STATES: tl.constexpr,
    DECAYS: tl.constexpr,
    PADDED_STATES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of lines, row). The state absorbs kept places, then those of the step."""
    row = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + row)
    first = tl.load(positions + row * width).to(tl.int32)
    start = tl.load(absorbed + row).to(tl.int32)
    end = tl.load(settled + row).to(tl.int32)
    LINES: tl.constexpr = HEADS * DEPTH
    FEATURES: tl.constexpr = LINES + HEADS + GROUPS * STATES
    line = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.arange(0, PADDED_STATES)
    lines, there = line < LINES, (line < LINES)[:, None] & (number < STATES)[None, :]
    head = line // DEPTH
    shared = head[:, None] // (HEADS // GROUPS) * STATES + number[None, :]
    if DECAYS == 1:
        rate = tl.load(A + head, mask=lines, other=0.0)[:, None]
    else:
        rate = tl.load(A + head[:, None] * STATES + number[None, :], mask=there, other=0.0)

    state += (slot * LINES + line[:, None]) * STATES + number[None, :]
    # After no tokens the state is zero, whatever is stored.
    now = tl.load(state, mask=there & (start > 0), other=0.0)
    stays = now
    for position in range(start, first + width):
        place = inputs_of(kept, inputs, slot, row, position, first, size, width, FEATURES)
        x = tl.load(place + line, mask=lines, other=0.0)
        step = tl.load(place + LINES + head, mask=lines, other=0.0)
        key = tl.load(place + LINES + HEADS + shared, mask=there, other=0.0)
        now = now * tl.exp(step[:, None] * rate) + (step * x)[:, None] * key
        # A choice, not a factor of zero: what is not settled may be NaN.
        stays = tl.where(position < end, now, stays)
        own = row * width + position - first
        query = tl.load(C + own * GROUPS * STATES + shared, mask=there & (position >= first), other=0.0)
        result = tl.sum(now * query, 1)
        tl.store(out + own * LINES + line, result, mask=lines & (position >= first))
    tl.store(state, stays, mask=there)


def scan_launches(
    inputs: torch.Tensor,
    A: torch.Tensor,
    C: torch.Tensor,
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
        inputs: x, dt and B side by side, ``[B, T, F]``.
    """
    rows, width, groups, states = C.shape
    heads, depth = state.shape[1:3]
    padded = power_of_2(states)
    block = min(max(1, NUMBERS // padded), power_of_2(heads * depth))
    scan = Launch(
        scan_lines,
        (-(-heads * depth // block), rows),
        {
            "inputs": inputs,
            "A": A,
            "C": C,
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
            "DEPTH": depth,
            "STATES": states,
            "DECAYS": A.shape[1],
            "PADDED_STATES": padded,
            "BLOCK": block,
        },
    )
    return scan, keep_launch(inputs, kept, slots, positions, settled)


def selective_scan(
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    state: torch.Tensor,
    kept: torch.Tensor,
    *cursor: torch.Tensor,
) -> torch.Tensor:
    """:func:`speccompile.ops.selective_scan.reference` on CUDA; ``state`` and ``kept`` must be contiguous."""
    inputs, out = side_by_side((x, dt, B)), torch.empty_like(x).contiguous()
    slots, positions, absorbed, settled = (item.contiguous() for item in cursor)
    A, C = A.contiguous(), C.contiguous()
    run_all(scan_launches(inputs, A, C, state, kept, slots, positions, absorbed, settled, out), x)
    return out

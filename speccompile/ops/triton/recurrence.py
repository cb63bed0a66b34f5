"""Parts that the kernels of recurrences share: positions of a row, inputs of a position, and storing of kept inputs.

A recurrence reads kept inputs, and the inputs that it keeps may overwrite them: keeping is a separate launch after it.
Both have the layout of :mod:`speccompile.ops.recurrence`. A position is computed by the same code whether its inputs
are kept ones or new ones, and whatever the width: its bits depend on neither.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch

# Numbers of a place that a program keeps.
BLOCK = 1024


@triton.jit
def inputs_of(kept, inputs, slot, row, position, first, size, width, FEATURES: tl.constexpr):  # type: ignore[no-untyped-def]
    """Address of the inputs of a position: kept ones before the row's first position, else those of the step."""
    if position < first:
        place = kept + (slot * size + position % size) * FEATURES
    else:
        place = inputs + (row * width + position - first) * FEATURES
    return place


@triton.jit(do_not_specialize=["width"])
def keep_places(  # type: ignore[no-untyped-def]
    inputs, kept, slots, positions, settled, reach, size, width, FEATURES: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (block of numbers, place, row)."""
    place, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    position = tl.load(positions + row * width) + place
    begin = tl.load(settled + row) - reach
    if (position >= begin) & (position < begin + size):
        slot = tl.load(slots + row)
        number = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(inputs + (row * width + place) * FEATURES + number, mask=number < FEATURES)
        tl.store(kept + (slot * size + position % size) * FEATURES + number, value, mask=number < FEATURES)


def keep_launch(
    inputs: torch.Tensor,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settled: torch.Tensor,
    reach: int = 0,
) -> Launch:
    """Launch that keeps inputs ``[B, T, F]`` in ``kept`` ``[N, R, F]``: of the R positions from ``settled - reach`` on,
    those that the step has. All tensors must be contiguous.
    """
    rows, width, features = inputs.shape
    block = min(BLOCK, power_of_2(features))
    return Launch(
        keep_places,
        (-(-features // block), width, rows),
        {
            "inputs": inputs,
            "kept": kept,
            "slots": slots,
            "positions": positions,
            "settled": settled,
            "reach": reach,
            "size": kept.shape[1],
            "width": width,
            "FEATURES": features,
            "BLOCK": block,
        },
    )


def side_by_side(items: Sequence[torch.Tensor]) -> torch.Tensor:
    """Inputs ``[B, T, ...]`` as one ``[B, T, F]``, in the layout of what is kept."""
    return torch.cat([item.flatten(2) for item in items], dim=2)

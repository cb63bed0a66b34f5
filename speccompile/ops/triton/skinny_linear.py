"""A linear over at most 16 rows: the weight is streamed once, by more programs than cuBLAS starts for so few rows.

A program multiplies a tile of outputs with all rows, whose number is padded to the tensor cores' 16. The order of sums
depends only on the weight's shape, so a row has the same bits at every width, whatever the other rows are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all

#: The tensor cores multiply this many rows at least, so fewer cost the same.
MOST_ROWS = 16


@dataclass(frozen=True)
class Tile:
    """Outputs and inputs that a program multiplies at a time, stages of its pipeline, and its warps."""

    outputs: int
    inputs: int
    stages: int
    warps: int


# Measured on an H200 with weights of Llama-3.1-8B, at 1 and 8 rows. Larger tiles need enough outputs for all
# multiprocessors: there are about 90 programs of them from this many outputs on.
_LARGE, _SMALL = Tile(64, 128, 5, 4), Tile(16, 512, 3, 2)
_MANY_OUTPUTS = 5632


@triton.jit(do_not_specialize=["rows"])
def multiply_few_rows(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    out,
    x_row,
    rows,
    depth,
    features,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
):
    """Program (tile of outputs): its columns of ``out`` ``[rows, features]``."""
    feature = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, lane = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    there, live = feature[:, None] < features, row[None, :] < rows
    weights = weight + feature.to(tl.int64)[:, None] * depth + lane[None, :]
    inputs = x + row[None, :] * x_row + lane[:, None]
    total = tl.zeros((OUTPUTS, ROWS), tl.float32)
    for first in range(0, depth, INPUTS):
        inside = first + lane < depth
        # No other program reads it.
        tile = tl.load(weights, mask=there & inside[None, :], other=0.0, eviction_policy="evict_first")
        total = tl.dot(tile, tl.load(inputs, mask=live & inside[:, None], other=0.0), total)
        weights += INPUTS
        inputs += INPUTS
    if bias is not None:
        total += tl.load(bias + feature, mask=feature < features, other=0.0).to(tl.float32)[:, None]
    at = out + row[None, :].to(tl.int64) * features + feature[:, None]
    tl.store(at, total.to(out.dtype.element_ty), mask=there & live)


def skinny_linear_launch(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out: torch.Tensor) -> Launch:
    """The launch; ``x`` ``[rows, K]`` may have gaps between rows, the others are contiguous."""
    features, depth = weight.shape
    tile = _LARGE if features >= _MANY_OUTPUTS else _SMALL
    arguments = {
        "x": x,
        "weight": weight,
        "bias": bias,
        "out": out,
        "x_row": x.stride(0),
        "rows": x.shape[0],
        "depth": depth,
        "features": features,
        "ROWS": MOST_ROWS,
        "OUTPUTS": tile.outputs,
        "INPUTS": tile.inputs,
    }
    return Launch(multiply_few_rows, (-(-features // tile.outputs),), arguments, tile.warps, tile.stages)


def skinny_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``speccompile::skinny_linear`` on CUDA; arguments and result as the op's ``reference`` has them."""
    flat = x.reshape(-1, x.shape[-1])
    if flat.shape[0] > MOST_ROWS or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    flat = flat if flat.stride(-1) == 1 else flat.contiguous()
    out = x.new_empty((*x.shape[:-1], weight.shape[0]))
    run_all([skinny_linear_launch(flat, weight, bias, out)], x)
    return out

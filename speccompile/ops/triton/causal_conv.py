"""The causal convolution on CUDA: one program for each place and block of channels, the sum in the order of taps."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.attention_plan import power_of_2
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.recurrence import keep_launch

# Channels of a program.
BLOCK = 256


@triton.jit(do_not_specialize=["width"])
def convolve_places(  # type: ignore[no-untyped-def]
    x,
    weight,
    bias,
    kept,
    out,
    slots,
    positions,
    size,
    width,
    CHANNELS: tl.constexpr,
    WINDOW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (block of channels, place, row)."""
    place, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < CHANNELS
    x += row * width * CHANNELS + channel
    kept += tl.load(slots + row) * size * CHANNELS + channel
    first = tl.load(positions + row * width)
    total = tl.zeros((BLOCK,), tl.float32)
    if bias is not None:
        total = tl.load(bias + channel, mask=there, other=0.0)
    for tap in tl.static_range(WINDOW):
        at = place - WINDOW + 1 + tap
        position = first + at
        new = tl.load(x + at * CHANNELS, mask=there & (at >= 0), other=0.0)
        # Before the sequence there is nothing, whatever is kept there.
        old = tl.load(kept + position % size * CHANNELS, mask=there & (at < 0) & (position >= 0), other=0.0)
        value = tl.where(at >= 0, new, old)
        total += tl.load(weight + channel * WINDOW + tap, mask=there, other=0.0) * value
    tl.store(out + (row * width + place) * CHANNELS + channel, total, mask=there)


def causal_conv_launches(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settled: torch.Tensor,
    out: torch.Tensor,
) -> tuple[Launch, Launch]:
    """Two launches over contiguous tensors: results, then the inputs that stay."""
    rows, width, channels = x.shape
    block, window = min(BLOCK, power_of_2(channels)), weight.shape[1]
    convolve = Launch(
        convolve_places,
        (-(-channels // block), width, rows),
        {
            "x": x,
            "weight": weight,
            "bias": bias,
            "kept": kept,
            "out": out,
            "slots": slots,
            "positions": positions,
            "size": kept.shape[1],
            "width": width,
            "CHANNELS": channels,
            "WINDOW": window,
            "BLOCK": block,
        },
    )
    return convolve, keep_launch(x, kept, slots, positions, settled, reach=window - 1)


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    kept: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    settled: torch.Tensor,
) -> torch.Tensor:
    """:func:`speccompile.ops.causal_conv.reference` on CUDA; ``kept`` must be contiguous."""
    x, weight, slots, positions, settled = (item.contiguous() for item in (x, weight, slots, positions, settled))
    bias, out = None if bias is None else bias.contiguous(), torch.empty_like(x)
    run_all(causal_conv_launches(x, weight, bias, kept, slots, positions, settled, out), x)
    return out

"""The launches that find the least score that stays at each place after top-k, top-p and min-p."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton

from speccompile.ops.tolerances import MIN_P_ROUNDING, ROUNDING
from speccompile.ops.triton.launch import Launch
from speccompile.ops.triton.threshold_kernels import (
    find_least,
    find_peaks,
    gather_candidates,
    mask_below,
    weigh_bands,
)

# Ids of a program, at most 4096: it adds counts and masses in one integer.
SPAN = 4096
PIVOTS = 16
# Candidates that the search reads at once.
BLOCK = 1024


@dataclass(frozen=True)
class Filters:
    """Options of the rows, in memory of slots or rows.

    Args:
        slots: int64 ``[B]``; None: the options are ``[B]``, else ``[N]``.
        temperature: float32, that divides the logits; None is 1.
        top_k: int64, 0 for all; top_p: float32, 1 for all; min_p: float32, 0 for all; None is for all.
    """

    slots: torch.Tensor | None = None
    temperature: torch.Tensor | None = None
    top_k: torch.Tensor | None = None
    top_p: torch.Tensor | None = None
    min_p: torch.Tensor | None = None


@dataclass(frozen=True)
class Workspace:
    """Memory of the launches; ``least`` float32 ``[B, T]`` is their result."""

    peaks: torch.Tensor
    pivots: torch.Tensor
    totals: torch.Tensor
    candidates: torch.Tensor
    found: torch.Tensor
    least: torch.Tensor

    @staticmethod
    def of(logits: torch.Tensor) -> Workspace:
        """For ``logits`` ``[B, T, V]``."""
        rows, width, vocab = logits.shape

        def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return logits.new_empty((rows, width, *shape), dtype=dtype)

        return Workspace(
            peaks=new(2, splits_of(vocab)),
            pivots=new(PIVOTS),
            totals=new(2, PIVOTS, dtype=torch.int64),
            candidates=new(vocab),
            found=new(dtype=torch.int32),
            least=new(),
        )


def splits_of(vocab: int) -> int:
    """Number of parts of a vocabulary that programs read separately."""
    return -(-vocab // SPAN)


def threshold_launches(logits: torch.Tensor, filters: Filters, space: Workspace) -> Sequence[Launch]:
    """The launches that find ``space.least`` of ``logits`` ``[B, T, V]`` with contiguous ids."""
    rows, width, vocab = logits.shape
    splits = splits_of(vocab)
    padded = triton.next_power_of_2(splits)
    read = {
        "logits": logits,
        "logit_row": logits.stride(0),
        "logit_place": logits.stride(1),
        "vocab": vocab,
        "slots": filters.slots,
        "temperature": filters.temperature,
        "SPAN": SPAN,
    }
    wanted = {"top_k": filters.top_k, "top_p": filters.top_p}
    sums = {"totals": space.totals, "PIVOTS": PIVOTS}
    peaks, pivots = {"peaks": space.peaks}, {"pivots": space.pivots}
    listed = {"candidates": space.candidates, "found": space.found}
    every = splits, width, rows
    first = {**read, **wanted, **sums, **peaks, "min_p": filters.min_p, "found": space.found}
    second = {**read, **wanted, **sums, **peaks, **pivots, "SPLITS": padded}
    third = {**read, **wanted, **sums, **pivots, **listed, "ROUNDING": ROUNDING}
    last = {
        **wanted,
        **sums,
        **peaks,
        **pivots,
        **listed,
        "vocab": vocab,
        "splits": splits,
        "slots": filters.slots,
        "min_p": filters.min_p,
        "least": space.least,
        "ROUNDING": ROUNDING,
        "MIN_P_ROUNDING": MIN_P_ROUNDING,
        "SPLITS": padded,
        "BLOCK": BLOCK,
    }
    searched = [Launch(weigh_bands, every, second, warps=8), Launch(gather_candidates, every, third, warps=8)]
    # Min-p follows from the greatest score.
    searches = filters.top_k is not None or filters.top_p is not None
    return (
        Launch(find_peaks, every, first, warps=8),
        *(searched if searches else ()),
        Launch(find_least, (width, rows), last, warps=8),
    )


def mask_launch(logits: torch.Tensor, filters: Filters, least: torch.Tensor, scores: torch.Tensor) -> Launch:
    """The launch that writes ``scores`` float32 ``[B, T, V]``, -inf where they are below ``least`` ``[B, T]``. Without
    a temperature ``scores`` must be ``logits``."""
    rows, width, vocab = logits.shape
    arguments = {
        "logits": logits,
        "logit_row": logits.stride(0),
        "logit_place": logits.stride(1),
        "vocab": vocab,
        "slots": filters.slots,
        "temperature": filters.temperature,
        "least": least,
        "scores": scores,
        "score_row": scores.stride(0),
        "score_place": scores.stride(1),
        "SPAN": SPAN,
    }
    return Launch(mask_below, (splits_of(vocab), width, rows), arguments, warps=8)

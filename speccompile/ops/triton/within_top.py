"""Test whether drafts are almost as likely as the likeliest token, without sorting.

A draft's rank is the number of tokens before it. The order of sums depends only on V, so a position's result does not
depend on other positions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all

# Ids that a program reads at once.
BLOCK = 2048


@triton.jit
def within_top_places(  # type: ignore[no-untyped-def]
    scores,
    drafts,
    allowed,
    within,
    score_row,
    score_place,
    draft_row,
    draft_place,
    vocab,
    top_k,
    BLOCK: tl.constexpr,
):
    """Program (place, row)."""
    place, row = tl.program_id(0), tl.program_id(1)
    scores += row.to(tl.int64) * score_row + place.to(tl.int64) * score_place
    draft = tl.load(drafts + row.to(tl.int64) * draft_row + place * draft_place)
    known = (draft >= 0) & (draft < vocab)
    draft = tl.where(known, draft, 0)
    own = tl.load(scores + draft).to(tl.float32)
    lane = tl.arange(0, BLOCK)

    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    ahead = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, vocab, BLOCK):
        ids = first + lane
        value = tl.load(scores + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        top = tl.maximum(top, value)
        ahead += ((ids < vocab) & ((value > own) | ((value == own) & (ids < draft)))).to(tl.int32)
    highest = tl.max(top)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, vocab, BLOCK):
        ids = first + lane
        value = tl.load(scores + ids, mask=ids < vocab, other=float("-inf")).to(tl.float32)
        total += tl.where(ids < vocab, tl.exp(value - highest), 0.0)

    # With a NaN, or if all scores of the position are -inf, all of these are NaN, which compares as False.
    whole = tl.sum(total)
    own_prob = tl.exp(own - highest) / whole
    enough = 1.0 / whole - tl.load(allowed + row)
    found = known & (tl.sum(ahead) < top_k) & (own_prob >= enough) & (own_prob > 0)
    tl.store(within + row * tl.num_programs(0) + place, found)


def within_top_launch(
    scores: torch.Tensor, drafts: torch.Tensor, allowed: torch.Tensor, top_k: int, within: torch.Tensor
) -> Launch:
    """Over ``scores`` ``[B, T, V]``, ids side by side, ``drafts`` int64 ``[B, K]`` and ``allowed`` float32 ``[B]``;
    ``within`` is bool ``[B, K]``, contiguous."""
    rows, places = drafts.shape
    arguments = {
        "scores": scores,
        "drafts": drafts,
        "allowed": allowed,
        "within": within,
        "score_row": scores.stride(0),
        "score_place": scores.stride(1),
        "draft_row": drafts.stride(0),
        "draft_place": drafts.stride(1),
        "vocab": scores.shape[-1],
        "top_k": top_k,
        "BLOCK": BLOCK,
    }
    return Launch(within_top_places, (places, rows), arguments, warps=8)


def is_within_top(scores: torch.Tensor, drafts: torch.Tensor, allowed: torch.Tensor, top_k: int) -> torch.Tensor:
    """:func:`speccompile.ops.within_top.reference` on CUDA, for ``scores`` whose ids are contiguous."""
    within = torch.empty(drafts.shape, dtype=torch.bool, device=scores.device)
    if drafts.numel():
        run_all([within_top_launch(scores, drafts, allowed.contiguous(), top_k, within)], scores)
    return within

"""Tokens drawn from logits with temperature, top-k, top-p and min-p, and the scores that these leave.

Options are read where they lie in the arena, so a step gathers nothing before. The choice is the one of
``speccompile.ops.triton.choose``, over scores that are never written to memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from speccompile.ops.noise import TOKENS
from speccompile.ops.triton import choose
from speccompile.ops.triton.choose import bits_of, choose_combine, gumbel_of, key_of
from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.threshold import Filters, Workspace, mask_launch, threshold_launches
from speccompile.ops.triton.threshold_kernels import score_of, slot_of


@triton.jit
def draw_partial(  # type: ignore[no-untyped-def]
    logits,
    logit_row,
    logit_place,
    vocab,
    slots,
    length,
    depths,
    temperature,
    seed,
    noise_stream,
    least,
    best_value,
    best_id,
    BLOCK: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Program (split, place, row): as ``choose_partial``, over scores that are not below the ``least`` of the place."""
    split, place, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot = slot_of(slots, row)
    draws = tl.load(temperature + slot) > 0
    at = row * tl.num_programs(1) + place
    lowest = tl.load(least + at)
    if depths is None:
        position = tl.load(length + slot) + place
    else:
        position = tl.load(length + slot) + tl.load(depths + at)
    key = key_of(tl.load(seed + slot), noise_stream, position, None)
    logits += row.to(tl.int64) * logit_row + place.to(tl.int64) * logit_place
    lane = tl.arange(0, BLOCK)
    top = tl.full((BLOCK,), float("-inf"), tl.float32)
    chosen = split * SPAN + lane
    spoiled = tl.zeros((BLOCK,), tl.int32)
    for offset in range(0, SPAN, BLOCK):
        ids = split * SPAN + offset + lane
        value = score_of(logits, ids, ids < vocab, temperature, slot)
        value = tl.where(value < lowest, float("-inf"), value)
        value = tl.where(draws, value + gumbel_of(bits_of(key, ids)), value)
        spoiled = spoiled | (value != value).to(tl.int32)
        # Of equal ones the first stays.
        chosen = tl.where(value > top, ids, chosen)
        top = tl.maximum(top, value)
    highest = tl.max(top)
    own = at * tl.num_programs(0) + split
    tl.store(best_id + own, tl.min(tl.where(top == highest, chosen, vocab)))
    tl.store(best_value + own, tl.where(tl.max(spoiled) > 0, float("nan"), highest))


def draw_launches(
    logits: torch.Tensor,
    filters: Filters,
    length: torch.Tensor,
    depths: torch.Tensor | None,
    seed: torch.Tensor,
    space: Workspace,
    best: tuple[torch.Tensor, torch.Tensor],
    tokens: torch.Tensor,
) -> Sequence[Launch]:
    """The launches of :func:`draw`, with ``best``, float32 and int32 ``[B, T, splits]``, as a further workspace."""
    rows, width, vocab = logits.shape
    splits = choose.splits_of(vocab)
    found = {"best_value": best[0], "best_id": best[1], "vocab": vocab}
    partial = {
        **found,
        "logits": logits,
        "logit_row": logits.stride(0),
        "logit_place": logits.stride(1),
        "slots": filters.slots,
        "length": length,
        "depths": depths,
        "temperature": filters.temperature,
        "seed": seed,
        "noise_stream": TOKENS,
        "least": space.least,
        "BLOCK": choose.BLOCK,
        "SPAN": choose.SPAN,
    }
    combine = {**found, "tokens": tokens, "splits": splits, "FORBIDS": True, "SPLITS": choose.SPLITS}
    return (
        *threshold_launches(logits, filters, space),
        Launch(draw_partial, (splits, width, rows), partial),
        Launch(choose_combine, (rows * width,), combine, warps=1),
    )


def draw(
    logits: torch.Tensor,
    filters: Filters,
    length: torch.Tensor,
    depths: torch.Tensor | None,
    seed: torch.Tensor,
) -> torch.Tensor:
    """``speccompile::draw_filtered`` on CUDA: tokens int64 ``[B, T]``.

    Args:
        logits: ``[B, T, V]``.
        filters: with slots and a temperature.
        length, seed: int64 ``[N]``; depths: int64 ``[B, T]``, None is 0 .. T-1.
    """
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    depths = None if depths is None else depths.contiguous()
    shape = (*logits.shape[:2], choose.splits_of(logits.shape[-1]))
    best = logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)
    tokens = logits.new_empty(shape[:2], dtype=torch.int64)
    run_all(draw_launches(logits, filters, length, depths, seed, Workspace.of(logits), best, tokens), logits)
    return tokens


def filter_logits(logits: torch.Tensor, filters: Filters) -> torch.Tensor:
    """``speccompile::filter_logits`` on CUDA: scores float32 ``[B, T, V]``; ``filters`` have a temperature."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    scores = torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
    space = Workspace.of(logits)
    launches = threshold_launches(logits, filters, space)
    run_all([*launches, mask_launch(logits, filters, space.least, scores)], logits)
    return scores


def filter_scores(scores: torch.Tensor, filters: Filters) -> None:
    """Set to -inf, in place, the ``scores`` float32 ``[B, T, V]`` that ``filters`` without a temperature remove."""
    space = Workspace.of(scores)
    launches = threshold_launches(scores, filters, space)
    run_all([*launches, mask_launch(scores, filters, space.least, scores)], scores)

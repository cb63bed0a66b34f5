"""Guides on CUDA: the tokens that a slot's automaton forbids, its next state, and the drafts that it allows.

Slots without an automaton return at once. The tables are those of :class:`speccompile.sampling.automata.Automata`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from speccompile.ops.triton.launch import Launch, run_all
from speccompile.ops.triton.token_lists import SPAN, of_scores


@triton.jit
def _moved(now, token, classes, moves, width, vocab):  # type: ignore[no-untyped-def]
    """The state after one more token; -1 where it is not allowed."""
    known = (now >= 0) & (token >= 0) & (token < vocab)
    own = tl.load(classes + token, mask=known, other=0)
    return tl.load(moves + now * width + own, mask=known, other=-1).to(tl.int64)


@triton.jit
def follow_automaton(  # type: ignore[no-untyped-def]
    scores,
    score_row,
    score_place,
    vocab,
    context,
    capacity,
    length,
    drafted,
    places,
    slots,
    states,
    widths,
    classes,
    moves,
    table,
    SPAN: tl.constexpr,
):
    """Program (split, row): -inf, at each place, for tokens that the state there forbids. Where the text is complete,
    its end is not forbidden."""
    split, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    now = tl.load(states + slot)
    if now < 0:
        return
    context += row.to(tl.int64) * capacity
    scores += row.to(tl.int64) * score_row
    classes += slot * vocab
    moves += slot * table
    width = tl.load(widths + slot)
    first = tl.load(length + row) - drafted
    ids = split * SPAN + tl.arange(0, SPAN)
    own = tl.load(classes + ids, mask=ids < vocab, other=0)
    for index in range(0, drafted + places):
        # After a draft that is not allowed nothing is forbidden.
        if (index >= drafted) & (now >= 0):
            to = tl.load(moves + now * width + own)
            here = scores + (index - drafted) * score_place + ids
            tl.store(here, float("-inf"), mask=(ids < vocab) & (to < 0))
            # The mark of a complete text in the last column.
            if tl.load(moves + now * width + width - 1) == -2:
                ends = (ids < vocab) & (to >= 0)
                forbidden = tl.load(here, mask=ends, other=0.0) == float("-inf")
                tl.store(here, 0.0, mask=ends & forbidden)
        token = tl.load(context + tl.minimum(first + index, capacity - 1))
        now = _moved(now, token, classes, moves, width, vocab)


@triton.jit
def advance_states(  # type: ignore[no-untyped-def]
    states, slots, tokens, capacity, length, emitted, most, widths, classes, moves, vocab, table
):
    """Program (row): the state after the last ``emitted`` tokens, at most ``most``."""
    slot = tl.load(slots + tl.program_id(0))
    now = tl.load(states + slot)
    if now < 0:
        return
    count = tl.load(emitted + slot)
    first = tl.load(length + slot) - count
    width = tl.load(widths + slot)
    for index in range(0, tl.minimum(count, most)):
        place = tl.minimum(tl.maximum(first + index, 0), capacity - 1)
        token = tl.load(tokens + slot * capacity + place)
        now = _moved(now, token, classes + slot * vocab, moves + slot * table, width, vocab)
    tl.store(states + slot, now)


@triton.jit
def truncate_lens(lens, slots, drafts, most, states, widths, classes, moves, vocab, table):  # type: ignore[no-untyped-def]
    """Program (row): at most as many drafts as are allowed one after another."""
    slot = tl.load(slots + tl.program_id(0))
    now = tl.load(states + slot)
    if now < 0:
        return
    width = tl.load(widths + slot)
    allowed = now * 0
    for index in range(0, most):
        token = tl.load(drafts + slot * most + index)
        now = _moved(now, token, classes + slot * vocab, moves + slot * table, width, vocab)
        allowed += (now >= 0).to(tl.int64)
    tl.store(lens + slot, tl.minimum(tl.load(lens + slot), allowed))


def _automata(states: torch.Tensor, slots: torch.Tensor, tables: Sequence[torch.Tensor]) -> dict[str, Any]:
    widths, classes, moves = tables
    own = {"states": states, "slots": slots, "widths": widths, "classes": classes, "moves": moves}
    return {**own, "vocab": classes.shape[1], "table": moves.shape[1]}


def follow_guide(
    scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, drafted: int, state: Sequence[torch.Tensor]
) -> None:
    """``guide_``: ``state`` is the rows' slots, then state and tables of all slots."""
    slots, states, *tables = state
    rows, places, vocab = scores.shape
    text = {"context": context.contiguous(), "capacity": context.shape[1], "length": length}
    own = {"drafted": drafted, "places": places, "SPAN": SPAN}
    arguments = {**of_scores(scores), **text, **own, **_automata(states, slots, tables)}
    run_all([Launch(follow_automaton, (-(-vocab // SPAN), rows), arguments, warps=8)], scores)


def advance_guide(
    states: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    emitted: torch.Tensor,
    most: int,
    tables: Sequence[torch.Tensor],
) -> None:
    """``advance_guide_``; arguments as of :func:`speccompile.sampling.automata.advance`."""
    text = {"tokens": tokens, "capacity": tokens.shape[1], "length": length, "emitted": emitted, "most": most}
    run_all([Launch(advance_states, (len(slots),), {**text, **_automata(states, slots, tables)}, warps=1)], states)


def truncate_drafts(
    lens: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    states: torch.Tensor,
    tables: Sequence[torch.Tensor],
) -> None:
    """``truncate_drafts_``; arguments as of :func:`speccompile.sampling.automata.allowed_lens`."""
    own = {"lens": lens, "drafts": drafts, "most": drafts.shape[1]}
    run_all([Launch(truncate_lens, (len(slots),), {**own, **_automata(states, slots, tables)}, warps=1)], lens)

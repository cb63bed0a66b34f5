"""Recurrences over the rows of a step, position by position; each row starts from the state of its slot.

A recurrent state has no positions, so it cannot be shortened as KV can. An op of this kind keeps a state and the inputs
of the newest positions of each slot. The state has absorbed only the settled tokens, those that no later step reads
again. A step first absorbs the kept inputs of the positions before its own: the drafts that were accepted after the
previous step. Inputs of rejected drafts are never read, and the step overwrites them.

Positions are absorbed in ascending order, whatever the width of a step. So a state has the same bits, however many
tokens each step accepted.

Arguments that all ops have:

* ``slots``: int64 ``[B]``, the slot of each row.
* ``positions``: int64 ``[B, T]``, the positions of each row's tokens, of which the first is read.
* ``absorbed``: int64 ``[B]``, how many tokens of the sequence the state has absorbed: at most the first position, and
  at least that less ``R``. After none the state counts as zero, whatever is stored.
* ``settled``: int64 ``[B]``, how many tokens the state has absorbed afterwards: between the first position and that
  plus T. Inputs of up to ``R`` places after them are kept.
* kept inputs: float32 ``[N, R, F]``; those of the position p lie at p modulo R.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

#: Arguments at the end of every schema.
CURSOR_SCHEMA = "Tensor slots, Tensor positions, Tensor absorbed, Tensor settled"


@dataclass(frozen=True)
class RowPlaces:
    """One row of a step: its slot, the position of its first token, and where its state stands before and after."""

    row: int
    slot: int
    first: int
    absorbed: int
    settled: int


def rows_of(
    slots: torch.Tensor, positions: torch.Tensor, absorbed: torch.Tensor, settled: torch.Tensor, kept: int
) -> Iterator[RowPlaces]:
    """The rows of a step.

    Args:
        kept: places whose inputs are kept, R.

    Raises:
        RuntimeError: a state stands at a place that the kept inputs do not reach, or would be left at one outside of
            the step.
    """
    columns = slots, positions[:, 0], absorbed, settled
    for row, numbers in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        slot, first, start, end = numbers
        if not max(0, first - kept) <= start <= first or not first <= end <= first + positions.shape[1]:
            raise RuntimeError(
                f"row {row} at position {first}: its state has absorbed {start} tokens and is to absorb {end}, "
                f"with {kept} positions kept and {positions.shape[1]} read"
            )
        yield RowPlaces(row, slot, first, start, end)


def scan(
    state: torch.Tensor,
    kept: torch.Tensor,
    inputs: torch.Tensor,
    rows: Iterator[RowPlaces],
    advance: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    read: Callable[[torch.Tensor, int, int], None],
) -> None:
    """Run a recurrence over the places of each row.

    Args:
        state: float32 ``[N, ...]``, written.
        kept: kept inputs ``[N, R, F]``, written.
        inputs: those of this step, ``[B, T, F]``.
        advance: the state after a place, from the state before it and the place's inputs ``[F]``.
        read: is called with the state after each place, row and place.
    """
    size = kept.shape[1]
    for at in rows:
        now = state[at.slot].clone() if at.absorbed else torch.zeros_like(state[at.slot])
        for position in range(at.absorbed, at.first):
            now = advance(now, kept[at.slot, position % size])
        settled = now
        for place in range(inputs.shape[1]):
            now = advance(now, inputs[at.row, place])
            if at.first + place < at.settled:
                settled = now
            read(now, at.row, place)
        state[at.slot] = settled
        keep(kept, inputs, at, at.settled)


def keep(kept: torch.Tensor, inputs: torch.Tensor, at: RowPlaces, begin: int) -> None:
    """Keep the row's inputs of those of the R positions from ``begin`` on that the step has."""
    size, width = kept.shape[1], inputs.shape[1]
    for position in range(max(begin, at.first), min(begin + size, at.first + width)):
        kept[at.slot, position % size] = inputs[at.row, position - at.first]

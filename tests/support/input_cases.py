"""Cases of the ops around a step's target: what is read, and what a ready drafter leaves."""

from __future__ import annotations

from collections.abc import Iterator

import torch

SLOTS, CAPACITY, LONGEST, VOCAB = 5, 40, 7, 50


def input_cases() -> Iterator[tuple[torch.Tensor | int | None, ...]]:
    """Arguments of ``step_inputs``: without drafts, from proposals, and with drafts that were given."""
    generator = torch.Generator().manual_seed(0)

    def whole(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for rows in (1, 3):
        slots = torch.randperm(SLOTS, generator=generator)[:rows]
        for draft_len, more in ((0, 0), (1, 0), (4, 0), (7, 0), (4, 3)):
            # A slot that no request has may have length 0.
            state = whole(VOCAB, SLOTS, CAPACITY), whole(CAPACITY - LONGEST, SLOTS), slots
            sizes = draft_len, draft_len + 1 + more, VOCAB
            limit, draft_limit = whole(CAPACITY, SLOTS), whole(LONGEST + 1, SLOTS)
            proposed = whole(VOCAB + 3, SLOTS, LONGEST, low=-1), whole(LONGEST + 1, SLOTS)
            given = whole(VOCAB + 3, rows, draft_len, low=-1), whole(draft_len + 1, rows)
            for most in (None, draft_limit):
                if draft_len == 0:
                    yield *state, None, None, None, most, *sizes
                else:
                    yield *state, *proposed, limit, most, *sizes
                    yield *state, *given, None, most, *sizes


def stored_cases() -> Iterator[list[torch.Tensor]]:
    """Arguments of ``store_drafts_``; the first two are written."""
    generator = torch.Generator().manual_seed(0)
    for rows in (1, 2, 5):
        length = torch.randint(1, CAPACITY, (SLOTS,), generator=generator)
        yield [
            torch.zeros(SLOTS, LONGEST, dtype=torch.int64),
            torch.zeros(SLOTS, dtype=torch.int64),
            length,
            length + torch.randint(0, 12, (SLOTS,), generator=generator),
            torch.randperm(SLOTS, generator=generator)[:rows],
            torch.randint(VOCAB, (rows, LONGEST), generator=generator),
            torch.randint(LONGEST + 4, (rows,), generator=generator),
        ]

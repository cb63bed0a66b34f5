"""What a policy is told: of the rows of a step before it runs, and of what came of them."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.graph.arena import Arena
from speccompile.policies.base import Done, Row
from speccompile.runtime.request import Request


def policy_rows(
    rows: Sequence[Request], arena: Arena, longest: int, *, ready: bool, scores: bool, reach: int | None = None
) -> list[Row]:
    """One for each row: how many drafts a step could judge for it.

    Args:
        longest: the largest draft length.
        ready: the drafter has proposed, and says so in the arena.
        scores: read what it thinks of its proposals, if it says that.
        reach: most tokens of a text that the drafter reads; None is as many as there may be.
    """
    lens = arena["draft_lens"].tolist() if ready and "draft_lens" in arena else None
    told = arena["draft_score"].tolist() if scores and ready and "draft_score" in arena else None
    offered = []
    for request in rows:
        context = len(request.prompt) + len(request.new_tokens)
        if lens is not None:
            count = min(longest, lens[request.slot])
        else:
            count = 0 if ready else max(0, min(longest, request.room - 1))
        if reach is not None:
            count = max(0, min(count, reach - 1 - context))
        if request.params.num_draft_tokens is not None:
            count = min(count, request.params.num_draft_tokens)
        said = () if told is None else tuple(told[request.slot][:count])
        offered.append(Row(request.number, context, count, said))
    return offered


def done_of(
    draft_len: int,
    offered: Sequence[Row],
    slots: Sequence[int],
    columns: Sequence[Sequence[int]],
    milliseconds: float | None,
) -> Done:
    """What came of the rows ``offered``, which had ``slots``.

    Args:
        columns: emitted, accepted and proposed tokens of each slot, and whether it is alive.
    """
    emitted, accepted, proposed, _ = (tuple(column[slot] for slot in slots) for column in columns)
    return Done(
        draft_len,
        tuple(row.request for row in offered),
        tuple(row.context for row in offered),
        proposed,
        accepted,
        emitted,
        tuple(row.scores[:count] for row, count in zip(offered, proposed, strict=True)),
        milliseconds,
    )

"""The inputs of policies: the rows of a step before it runs, and their results."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.graph.arena import Arena
from speccompile.policies.base import Done, Row
from speccompile.runtime.request import Request


def policy_rows(
    rows: Sequence[Request],
    arena: Arena,
    longest: int,
    *,
    ready: bool,
    scores: bool,
    reach: int | None = None,
    network_on_demand: bool = False,
) -> list[Row]:
    """Return, for each row, the number of drafts that a step could verify.

    Args:
        longest: most drafts that a step can accept.
        ready: the drafter has already proposed.
        scores: include the drafter's scores of its proposals, if it has any. Drafts that a guide forces are certain.
        reach: the longest context that the drafter can read; None means no limit.
        network_on_demand: a network drafts for rows without a proposal.
    """
    confidence = arena["draft_confidence"].tolist() if scores and "draft_confidence" in arena else None
    offered = []
    for request in rows:
        context = len(request.prompt) + len(request.new_tokens)
        proposed = request.proposal.length if ready else 0
        by_network = not ready or (network_on_demand and not proposed)
        count = min(longest, max(0, request.tokens_left - 1) if by_network else proposed)
        if reach is not None and by_network:
            count = max(0, min(count, reach - 1 - context))
        if request.params.num_draft_tokens is not None:
            count = min(count, request.params.num_draft_tokens)
        # A guide adds no tokens to a tree.
        in_chain = not by_network and not request.proposal.nodes
        forced = request.forced_drafts(len(request.new_tokens), count) if in_chain else 0
        own: Sequence[float] = ()
        if by_network and confidence is not None:
            own = [confidence[request.slot]]
        elif not by_network and scores:
            own = _scores(request.proposal.scores, forced)
        found = bool(forced) or (network_on_demand and not by_network)
        offered.append(Row(request.number, context, count, tuple(own[:count]), found))
    return offered


def _scores(scores: Sequence[float], forced: int) -> list[float]:
    """The ``scores`` of a chain whose first ``forced`` drafts are certain."""
    before = scores[forced - 1] if 0 < forced <= len(scores) else 1.0
    return [1.0] * forced + [score / before if before > 0 else 0.0 for score in scores[forced:]]


def done_of(
    draft_len: int,
    offered: Sequence[Row],
    slots: Sequence[int],
    columns: Sequence[Sequence[int]],
    milliseconds: float | None,
    chain: Sequence[Sequence[int]] = (),
) -> Done:
    """Return the results of the rows ``offered``, which had ``slots``.

    Args:
        columns: emitted, accepted and proposed tokens of each slot, and whether it is alive.
        chain: for a tree, the accepted and the judged drafts of its chain, for each slot.
    """
    # Lists: in every step, generators would take as long as the policy.
    emitted, accepted, proposed, _ = [tuple([column[slot] for slot in slots]) for column in columns]
    return Done(
        draft_len,
        tuple([row.request for row in offered]),
        tuple([row.context for row in offered]),
        proposed,
        accepted,
        emitted,
        tuple([row.scores[:count] for row, count in zip(offered, proposed, strict=True)]),
        milliseconds,
        tuple([row.found for row in offered]),
        tuple(zip(*[[of[slot] for slot in slots] for of in chain], strict=True)) if chain else (),
    )

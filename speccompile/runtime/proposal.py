"""Drafts for the next step of a row."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Proposal:
    """The drafts of a ready drafter for one row, as in the newest result that the host has read. If results are read
    one step late, the step that is running verifies them.

    Args:
        length: draft tokens in the chain.
        nodes: draft tokens in the tree.
        source: the drafter, by its index in ``Mode.drafter_names``.
        scores: one for each draft token of the chain, if the drafter scores them.
    """

    length: int = 0
    nodes: int = 0
    source: int = 0
    scores: tuple[float, ...] = ()


NO_PROPOSAL = Proposal()

"""What a policy is: which draft length the next step uses.

A policy is a description: ``wrap`` and the simulator start a :class:`Chooser` from it, which has the memory. Nothing in
this folder needs torch, and what is chosen follows from what a chooser received alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from speccompile.policies.costs import CostTable


@runtime_checkable
class Policy(Protocol):
    """The simple kind: a function of the number of rows."""

    def choose(self, live_rows: int) -> int:
        """The draft length for a step with ``live_rows`` rows; it has to be that of a tier."""


@dataclass(frozen=True)
class TreeShape:
    """What a policy knows of a tier whose drafts are a tree: most draft tokens that it accepts, and whether a token has
    several continuations."""

    depth: int
    branches: int


@dataclass(frozen=True)
class Ladder:
    """What there is to choose from.

    Args:
        draft_lens: K of every tier that was built, rising, 0 among them.
        costs: what their steps take; None if the policy does not ask (``uses_costs``).
        trees: the tiers whose drafts are trees, which are not draft lengths.
    """

    draft_lens: tuple[int, ...]
    costs: CostTable | None = None
    trees: Mapping[int, TreeShape] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest draft length."""
        return self.draft_lens[-1]

    @property
    def rungs(self) -> tuple[int, ...]:
        """The draft lengths; where 0 is the only one and there are trees, also the tree of the most nodes."""
        return self.draft_lens if self.largest or not self.trees else (*self.draft_lens, max(self.trees))

    def most_accepted(self, tier: int) -> int:
        """Most draft tokens that a step of the tier accepts."""
        return self.trees[tier].depth if tier in self.trees else tier

    def serving(self, draft_len: int, proposed: int) -> int:
        """The smallest tier that has room for the first ``draft_len`` of ``proposed`` drafts: no match, no width."""
        return min(size for size in self.draft_lens if size >= min(draft_len, proposed))


@dataclass(frozen=True)
class Row:
    """What is known of one row of the next step.

    Args:
        request: a number that is its request's alone.
        context: tokens before the step.
        draft_len: most draft tokens that the step can judge for it; of a drafter that has proposed, so many as that is.
        scores: of a drafter that tells, for the first of them the probability that all drafts up to it are right.
        found: its drafts are there already, so that a network which drafts for other rows has nothing to do for it.
    """

    request: int
    context: int
    draft_len: int
    scores: tuple[float, ...] = ()
    found: bool = False


@dataclass(frozen=True)
class Upcoming:
    """The next step. Of steps whose results have not been read (``unread``), ``rows`` know nothing yet."""

    rows: tuple[Row, ...]
    unread: int = 0

    @property
    def drafted(self) -> bool:
        """Whether a split drafter runs before it: some row has no drafts yet."""
        return not all(row.found for row in self.rows)


@dataclass(frozen=True)
class Done:
    """What came of one step. All tuples have one entry for each row.

    Args:
        draft_len: K of the tier that ran.
        requests, contexts: as in :class:`Row`.
        proposed: drafts that were judged.
        accepted, emitted: a and n.
        scores: as in :class:`Row`, of the drafts that were judged.
        milliseconds: what the step took; None if it is not known.
        found: as in :class:`Row`.
        chain: of a tree, the drafts of the chain in it that were accepted, and that were judged.
    """

    draft_len: int
    requests: tuple[int, ...]
    contexts: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    scores: tuple[tuple[float, ...], ...] = ()
    milliseconds: float | None = None
    found: tuple[bool, ...] = ()
    chain: tuple[tuple[int, int], ...] = ()

    @property
    def drafted(self) -> bool:
        """Whether a split drafter ran before it."""
        return not self.found or not all(self.found)


class Chooser(Protocol):
    """A policy at work. Both methods are called in the order of the steps; a step may be chosen before the results
    of earlier ones have been reported."""

    def choose(self, upcoming: Upcoming) -> int:
        """The draft length of the next step."""

    def note(self, done: Done) -> None:
        """What came of a step."""


@runtime_checkable
class StoppingChooser(Protocol):
    """A chooser that may stop a drafter which drafts in segments, before it has drafted for the chosen tier."""

    def stops(self, upcoming: Upcoming, drafted: int) -> bool:
        """Whether the tier ``drafted`` runs, rather than the one that was chosen. ``rows`` have scores of the first
        ``drafted`` drafts."""


@runtime_checkable
class LearningPolicy(Protocol):
    """The other kind: it learns from what steps did. ``str()`` of one is text that ``wrap(policy=...)`` reads."""

    @property
    def uses_costs(self) -> bool:
        """Whether tiers have to be timed for it."""

    def check(self, draft_lens: Collection[int]) -> None:
        """Raises UnknownTier if it names a draft length that was not built."""

    def start(self, ladder: Ladder) -> Chooser:
        """A chooser that has seen nothing yet."""


AnyPolicy = Policy | LearningPolicy


@dataclass(frozen=True)
class ByRows:
    """The chooser of a simple policy."""

    policy: Policy

    def choose(self, upcoming: Upcoming) -> int:
        """The draft length that the policy has for the number of live rows."""
        return self.policy.choose(len(upcoming.rows))

    def note(self, done: Done) -> None:
        """It learns nothing."""


def start(policy: AnyPolicy, ladder: Ladder) -> Chooser:
    """A chooser for either kind."""
    return policy.start(ladder) if isinstance(policy, LearningPolicy) else ByRows(policy)

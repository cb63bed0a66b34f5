"""Interfaces of policies. A policy chooses the draft length of the next step.

A policy is a description. ``wrap`` and the simulator start a :class:`Chooser` from it, which holds the history. This
folder does not need torch, and a choice depends only on the calls that the chooser has received.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from speccompile.policies.costs import CostTable


@runtime_checkable
class Policy(Protocol):
    """A simple policy: a function of the number of rows."""

    def choose(self, live_rows: int) -> int:
        """Return the draft length for a step with ``live_rows`` rows. It must be the draft length of a tier."""


@dataclass(frozen=True)
class TreeTier:
    """Shape of a tier whose drafts are a tree: the largest number of draft tokens that it accepts, and the number of
    continuations of a token."""

    depth: int
    branches: int


@dataclass(frozen=True)
class Ladder:
    """Tiers to choose from.

    Args:
        draft_lens: K of every tier that was built, ascending, with 0.
        costs: costs of their steps; None if the policy does not need them (``uses_costs``).
        trees: tiers whose drafts are trees. Their keys are node counts, not draft lengths.
    """

    draft_lens: tuple[int, ...]
    costs: CostTable | None = None
    trees: Mapping[int, TreeTier] = field(default_factory=dict)

    @property
    def largest(self) -> int:
        """The largest draft length."""
        return self.draft_lens[-1]

    @property
    def rungs(self) -> tuple[int, ...]:
        """Draft lengths. If 0 is the only one and there are trees, also the tree with the most nodes."""
        return self.draft_lens if self.largest or not self.trees else (*self.draft_lens, max(self.trees))

    def most_accepted(self, tier: int) -> int:
        """Largest number of draft tokens that a step of the tier accepts."""
        return self.trees[tier].depth if tier in self.trees else tier

    def serving(self, draft_len: int, proposed: int) -> int:
        """Return the smallest tier that holds the first ``draft_len`` of ``proposed`` drafts."""
        return min(size for size in self.draft_lens if size >= min(draft_len, proposed))


@dataclass(frozen=True)
class Row:
    """State of one row of the next step.

    Args:
        request: a number that identifies the request.
        context: tokens before the step.
        draft_len: largest number of drafts that the step can judge for the row. After a drafter has proposed, the
            number of its drafts.
        scores: for the first drafts, the probability that all drafts up to it are right. Empty if the drafter has none.
        found: the row has its drafts already, and a network that drafts for other rows has nothing to do for it.
    """

    request: int
    context: int
    draft_len: int
    scores: tuple[float, ...] = ()
    found: bool = False


@dataclass(frozen=True)
class Upcoming:
    """The next step. ``rows`` do not include the ``unread`` steps whose results have not been read yet."""

    rows: tuple[Row, ...]
    unread: int = 0

    @property
    def drafted(self) -> bool:
        """Whether a split drafter runs before the step: some row has no drafts yet."""
        return not all(row.found for row in self.rows)


@dataclass(frozen=True)
class Done:
    """Results of one step. All tuples have one entry for each row.

    Args:
        draft_len: K of the tier that ran.
        requests, contexts: see :class:`Row`.
        proposed: numbers of drafts that were judged.
        accepted, emitted: a and n of the acceptance rule.
        scores: of the judged drafts, see :class:`Row`.
        milliseconds: duration of the step; None if it is not known.
        found: see :class:`Row`.
        chain: of a tree, the numbers of accepted and of judged drafts of the chain in it.
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
        """Whether a split drafter ran before the step."""
        return not self.found or not all(self.found)


class Chooser(Protocol):
    """Running state of a policy. Both methods are called in the order of the steps. A step may be chosen before the
    results of earlier steps have been reported."""

    def choose(self, upcoming: Upcoming) -> int:
        """Return the draft length of the next step."""

    def note(self, done: Done) -> None:
        """Record the results of a step."""


@runtime_checkable
class StoppingChooser(Protocol):
    """A chooser that may stop a drafter which drafts in segments, before it has drafted for the chosen tier."""

    def stops(self, upcoming: Upcoming, drafted: int) -> bool:
        """Return whether the step runs the tier ``drafted`` instead of the chosen one. ``rows`` have scores of the
        first ``drafted`` drafts."""


@runtime_checkable
class LearningPolicy(Protocol):
    """A policy that learns from the results of steps. ``wrap(policy=...)`` accepts its ``str()``."""

    @property
    def uses_costs(self) -> bool:
        """Whether ``wrap`` must time the tiers for it."""

    def check(self, draft_lens: Collection[int]) -> None:
        """Raise UnknownTier if the policy names a draft length that was not built."""

    def start(self, ladder: Ladder) -> Chooser:
        """Return a chooser without history."""


AnyPolicy = Policy | LearningPolicy


@dataclass(frozen=True)
class ByRows:
    """Chooser of a simple policy."""

    policy: Policy

    def choose(self, upcoming: Upcoming) -> int:
        """Return the draft length that the policy has for the number of live rows."""
        return self.policy.choose(len(upcoming.rows))

    def note(self, done: Done) -> None:
        """Ignore the results: a simple policy does not learn."""


def start(policy: AnyPolicy, ladder: Ladder) -> Chooser:
    """Return a chooser for either kind of policy."""
    return policy.start(ladder) if isinstance(policy, LearningPolicy) else ByRows(policy)

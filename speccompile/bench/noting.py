"""A policy that notes the results of each step and leaves the choice to another policy."""

from __future__ import annotations

from collections.abc import Collection

from speccompile.policies.base import AnyPolicy, Chooser, Done, Ladder, LearningPolicy, StoppingChooser, Upcoming, start


class Noting:
    """A policy with the choices of ``policy``, which keeps what it has learned each time the policy is set.

    Attributes:
        done: results of all steps since the list was emptied.
    """

    def __init__(self, policy: AnyPolicy) -> None:
        self._policy = policy
        self._chooser: NotingChooser | None = None
        self.done: list[Done] = []

    def __str__(self) -> str:
        return str(self._policy)

    @property
    def uses_costs(self) -> bool:
        """Whether the policy needs the costs of the tiers."""
        return isinstance(self._policy, LearningPolicy) and self._policy.uses_costs

    def check(self, draft_lens: Collection[int]) -> None:
        """See :class:`~speccompile.policies.base.LearningPolicy`."""
        if isinstance(self._policy, LearningPolicy):
            self._policy.check(draft_lens)

    def start(self, ladder: Ladder) -> Chooser:
        """The chooser of the first call, with its history."""
        if self._chooser is None:
            inner = start(self._policy, ladder)
            kind = StoppingNotingChooser if isinstance(inner, StoppingChooser) else NotingChooser
            self._chooser = kind(inner, self.done)
        return self._chooser


class NotingChooser:
    """Chooser of :class:`Noting`."""

    def __init__(self, inner: Chooser, done: list[Done]) -> None:
        self._inner = inner
        self._done = done

    def choose(self, upcoming: Upcoming) -> int:
        """Return the choice of the other policy."""
        return self._inner.choose(upcoming)

    def note(self, done: Done) -> None:
        """Pass on the results of a step, and keep them."""
        self._inner.note(done)
        self._done.append(done)


class StoppingNotingChooser(NotingChooser):
    """Chooser of :class:`Noting` for a policy that may stop a drafter between two of its segments."""

    def stops(self, upcoming: Upcoming, drafted: int) -> bool:
        """Return the decision of the other policy."""
        assert isinstance(self._inner, StoppingChooser)
        return self._inner.stops(upcoming, drafted)

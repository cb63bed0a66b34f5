"""Simulated requests with the drafts that would be right at each position."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from speccompile.policies.base import Done
from speccompile.runtime.trace_reader import RecordedRun


class Text(Protocol):
    """One request. A step at ``position`` begins after that many of its new tokens."""

    @property
    def length(self) -> int:
        """Number of its new tokens."""

    @property
    def prompt(self) -> int:
        """Number of its prompt tokens."""

    def offered(self, position: int, most: int) -> int:
        """Number of drafts that the drafter has, at most ``most``."""

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        """Scores of the first ``count`` drafts; empty if the drafter has no scores."""

    def found(self, position: int) -> bool:
        """Whether the drafts exist before the step, and no network drafts for it."""

    def accepted(self, position: int, count: int) -> int:
        """Number of right drafts among the first ``count``, up to the first wrong one."""

    def chances(self, position: int, count: int) -> list[float]:
        """True probability of each draft, given that those before it are right. Only the oracle uses it."""


@dataclass(frozen=True)
class RecordedText:
    """Request from a recorded trace. If a step at p had a right drafts, one that begins i tokens later would have
    ``a - i``.

    Args:
        runs: by position, the number of right drafts.
        available: by position, the number of drafts.
        draft_scores: by position, the scores of the drafts.
        found_at: the positions whose drafts were found, see :class:`~speccompile.policies.base.Row`.
    """

    prompt: int
    runs: Sequence[int]
    available: Sequence[int]
    draft_scores: Mapping[int, tuple[float, ...]]
    found_at: Collection[int] = ()

    @property
    def length(self) -> int:
        """Number of recorded tokens."""
        return len(self.runs)

    def offered(self, position: int, most: int) -> int:
        """Number of recorded drafts at ``position``, at most ``most``."""
        return min(most, self.available[position])

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        """The recorded scores of the first ``count`` drafts at ``position``."""
        return self.draft_scores.get(position, ())[:count]

    def found(self, position: int) -> bool:
        """Whether a lookup found the drafts at ``position``."""
        return position in self.found_at

    def accepted(self, position: int, count: int) -> int:
        """Number of the first ``count`` drafts at ``position`` that were accepted."""
        return min(count, self.runs[position])

    def chances(self, position: int, count: int) -> list[float]:
        """1 or 0 for each draft: the recorded outcome. The oracle thus knows the next step."""
        return [1.0] * self.accepted(position, count) + [0.0] * (count - self.accepted(position, count))


def texts_of(trace: RecordedRun) -> list[RecordedText]:
    """The requests of a trace, in the order in which they began."""
    return recorded_texts(trace.steps, trace.offered)


def recorded_texts(steps: Sequence[Done], offered: Sequence[Sequence[int]]) -> list[RecordedText]:
    """Requests of a record, in the order in which they began.

    Args:
        offered: for each step and row, the number of its drafts.
    """
    found: dict[int, _Positions] = {}
    for done, counts in zip(steps, offered, strict=True):
        for row, request in enumerate(done.requests):
            text = found.setdefault(request, _Positions(done.contexts[row]))
            text.add(done, row, counts[row])
    return [
        RecordedText(text.prompt, text.runs, text.available, text.draft_scores, text.found_at)
        for text in found.values()
        if text.runs
    ]


class _Positions:
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.runs: list[int] = []
        self.available: list[int] = []
        self.draft_scores: dict[int, tuple[float, ...]] = {}
        self.found_at: set[int] = set()

    def add(self, done: Done, row: int, offered: int) -> None:
        position = done.contexts[row] - self.prompt
        if position != len(self.runs):
            return  # Steps are missing, so the positions of later ones are unknown.
        scores = done.scores[row] if done.scores else ()
        found = bool(done.found) and done.found[row]
        for later in range(done.emitted[row]):
            self.runs.append(max(done.accepted[row] - later, 0))
            self.available.append(max(offered - later, 0))
            # A score is the probability of all drafts up to one. The earlier ones are right by now.
            if left := scores[later:]:
                before = scores[later - 1] if later else 1.0
                self.draft_scores[position + later] = tuple(score / before if before else 0.0 for score in left)
            if found and offered > later:
                self.found_at.add(position + later)

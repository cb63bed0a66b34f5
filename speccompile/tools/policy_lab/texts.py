"""Simulated requests: which of their drafts are right, wherever a step begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from speccompile.policies.base import Done
from speccompile.runtime.trace_reader import RecordedRun


class Text(Protocol):
    """One request. A step at ``position`` begins after that many of its new tokens."""

    @property
    def length(self) -> int:
        """The number of its new tokens."""

    @property
    def prompt(self) -> int:
        """The number of its prompt tokens."""

    def offered(self, position: int, most: int) -> int:
        """The number of drafts that the drafter has, at most ``most``."""

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        """The drafter's scores of the first ``count`` of them; empty if it has no scores."""

    def accepted(self, position: int, count: int) -> int:
        """How many of the first ``count`` are right before the first wrong one."""

    def chances(self, position: int, count: int) -> list[float]:
        """The true probability of each draft, if those before it are right. For the oracle alone."""


@dataclass(frozen=True)
class RecordedText:
    """A request as it was recorded. Where a run of a step at p found a drafts right, one that begins i tokens later
    would have found ``a - i``.

    Args:
        runs: by position, the number of drafts that are right.
        available: by position, the number of drafts.
        draft_scores: by position, their scores.
    """

    prompt: int
    runs: Sequence[int]
    available: Sequence[int]
    draft_scores: Mapping[int, tuple[float, ...]]

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

    def accepted(self, position: int, count: int) -> int:
        """Number of the first ``count`` drafts at ``position`` that were accepted."""
        return min(count, self.runs[position])

    def chances(self, position: int, count: int) -> list[float]:
        """1 or 0 for each draft: the recorded outcome, so that the oracle knows the next step."""
        return [1.0] * self.accepted(position, count) + [0.0] * (count - self.accepted(position, count))


def texts_of(trace: RecordedRun) -> list[RecordedText]:
    """The requests of a trace, in the order in which they began."""
    return recorded_texts(trace.steps, trace.offered)


def recorded_texts(steps: Sequence[Done], offered: Sequence[Sequence[int]]) -> list[RecordedText]:
    """The requests of a record, in the order in which they began.

    Args:
        offered: for each step and row, the number of its drafts.
    """
    found: dict[int, _Positions] = {}
    for done, counts in zip(steps, offered, strict=True):
        for row, request in enumerate(done.requests):
            text = found.setdefault(request, _Positions(done.contexts[row]))
            scores = done.scores[row] if done.scores else ()
            text.add(done.contexts[row], done.accepted[row], counts[row], done.emitted[row], scores)
    return [
        RecordedText(text.prompt, text.runs, text.available, text.draft_scores) for text in found.values() if text.runs
    ]


class _Positions:
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.runs: list[int] = []
        self.available: list[int] = []
        self.draft_scores: dict[int, tuple[float, ...]] = {}

    def add(self, context: int, accepted: int, offered: int, emitted: int, scores: tuple[float, ...]) -> None:
        position = context - self.prompt
        if position != len(self.runs):
            return  # Steps of it are missing, so the positions of the following ones are unknown.
        if scores:
            self.draft_scores[position] = scores
        for later in range(emitted):
            self.runs.append(max(accepted - later, 0))
            self.available.append(max(offered - later, 0))

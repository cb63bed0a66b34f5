"""What a simulated request is: which of its drafts would be right, wherever a step begins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from speccompile.policies.base import Done


class Text(Protocol):
    """One request. A step at ``position`` begins behind so many of its new tokens."""

    @property
    def length(self) -> int:
        """New tokens it has."""

    @property
    def prompt(self) -> int:
        """Tokens in front of them."""

    def offered(self, position: int, most: int) -> int:
        """How many of ``most`` drafts the drafter has."""

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        """What it says of the first ``count`` of them; empty if it says nothing."""

    def accepted(self, position: int, count: int) -> int:
        """How many of the first ``count`` are right, up to the first wrong one."""

    def chances(self, position: int, count: int) -> list[float]:
        """The true probability of each draft, if those in front of it are right: for the oracle alone."""


@dataclass(frozen=True)
class RecordedText:
    """A request as it was recorded. Where a run of a step at p found a drafts right, one that begins i tokens later
    would have found ``a - i``.

    Args:
        runs: by position, how many drafts are right.
        offers: by position, how many there were.
        said: by position, their scores.
    """

    prompt: int
    runs: Sequence[int]
    offers: Sequence[int]
    said: Mapping[int, tuple[float, ...]]

    @property
    def length(self) -> int:
        return len(self.runs)

    def offered(self, position: int, most: int) -> int:
        return min(most, self.offers[position])

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        return self.said.get(position, ())[:count]

    def accepted(self, position: int, count: int) -> int:
        return min(count, self.runs[position])

    def chances(self, position: int, count: int) -> list[float]:
        """What is recorded is what happened, so that this oracle knows the very next step."""
        return [1.0] * self.accepted(position, count) + [0.0] * (count - self.accepted(position, count))


def recorded_texts(steps: Sequence[Done], offers: Sequence[Sequence[int]]) -> list[RecordedText]:
    """The requests of a record, in the order in which they began.

    Args:
        offers: for each step and row, how many drafts there were.
    """
    found: dict[int, _Positions] = {}
    for done, offered in zip(steps, offers, strict=True):
        for row, request in enumerate(done.requests):
            text = found.setdefault(request, _Positions(done.contexts[row]))
            scores = done.scores[row] if done.scores else ()
            text.add(done.contexts[row], done.accepted[row], offered[row], done.emitted[row], scores)
    return [RecordedText(text.prompt, text.runs, text.offers, text.said) for text in found.values() if text.runs]


class _Positions:
    def __init__(self, prompt: int) -> None:
        self.prompt = prompt
        self.runs: list[int] = []
        self.offers: list[int] = []
        self.said: dict[int, tuple[float, ...]] = {}

    def add(self, context: int, accepted: int, offered: int, emitted: int, scores: tuple[float, ...]) -> None:
        position = context - self.prompt
        if position != len(self.runs):
            return  # Steps of it are missing: what follows belongs to no position that is known.
        if scores:
            self.said[position] = scores
        for later in range(emitted):
            self.runs.append(max(accepted - later, 0))
            self.offers.append(max(offered - later, 0))

"""Synthetic traces: sequences whose drafts are right with known probabilities."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from speccompile.tools.policy_lab.texts import Text


@dataclass(frozen=True)
class SyntheticText:
    """Sequence in which draft j of a step at position p is right if ``draws[p + j - 1]`` is below
    ``levels[p + j - 1] * decay ** (j - 1)``. Only ``decay``, by which later drafts are worse, depends on where a step
    begins.

    Args:
        levels: by position, the probability that a first draft is right.
        has: by position, whether the drafter has drafts.
        scored: the drafter returns these probabilities as scores.
    """

    levels: Sequence[float]
    draws: Sequence[float]
    decay: float = 0.95
    has: Sequence[bool] = ()
    scored: bool = False
    prompt: int = 100

    @property
    def length(self) -> int:
        """Number of tokens."""
        return len(self.levels)

    def offered(self, position: int, most: int) -> int:
        """Number of drafts that the drafter has at ``position``, at most ``most``."""
        return most if not self.has or self.has[position] else 0

    def scores(self, position: int, count: int) -> tuple[float, ...]:
        """The drafter's probabilities that all drafts up to each one are right; empty if it has none."""
        return tuple(itertools.accumulate(self.chances(position, count), float.__mul__)) if self.scored else ()

    def found(self, position: int) -> bool:
        """False: the drafter drafts in the step."""
        return False

    def accepted(self, position: int, count: int) -> int:
        """Number of the first ``count`` drafts at ``position`` that are accepted."""
        right = 0
        for chance, draw in zip(self.chances(position, count), self.draws[position : position + count], strict=False):
            if draw >= chance:
                break
            right += 1
        return right

    def chances(self, position: int, count: int) -> list[float]:
        """Probability that each of the next ``count`` drafts is right."""
        ahead = self.levels[position : position + count]
        return [level * self.decay**place for place, level in enumerate(ahead)]


def _text(levels: Sequence[float], rng: random.Random, decay: float = 0.95) -> SyntheticText:
    return SyntheticText(levels, [rng.random() for _ in levels], decay)


def constant(rng: random.Random, level: float, requests: int = 1, tokens: int = 3000) -> list[Text]:
    """Sequences whose drafts are right with the same probability everywhere."""
    return [_text([level] * tokens, rng) for _ in range(requests)]


def phases(rng: random.Random, low: float = 0.05, high: float = 0.92, requests: int = 1) -> list[Text]:
    """Sequences with a low, a high and a low phase, each of at least 200 steps of the tier that fits it."""
    levels = [low] * 400 + [high] * 2400 + [low] * 400
    return [_text(levels, rng, 0.99) for _ in range(requests)]


def mixture(rng: random.Random, requests: int = 96, tokens: int = 150) -> list[Text]:
    """More requests than rows, with different levels. The order in which they end does not matter."""
    return [_text([rng.choice((0.05, 0.3, 0.6, 0.9))] * tokens, rng) for _ in range(requests)]


def drift(rng: random.Random, requests: int = 1, tokens: int = 4000) -> list[Text]:
    """Sequences whose level rises and falls slowly."""
    shift = rng.random()
    levels = [0.5 + 0.45 * math.sin(2 * math.pi * (shift + place / 2000)) for place in range(tokens)]
    return [_text(levels, rng) for _ in range(requests)]


def sparse(rng: random.Random, requests: int = 1, tokens: int = 3000) -> list[Text]:
    """Sequences as under prompt lookup: drafts are often missing, and good if there are any."""
    texts: list[Text] = []
    for _ in range(requests):
        has = [found for _ in range(tokens // 20) for found in [rng.random() < 0.4] * 20]
        levels = [0.85 if found else 0.1 for found in has]
        texts.append(SyntheticText(levels, [rng.random() for _ in levels], has=has))
    return texts


#: Traces by name. Each function has a random generator as its argument.
TRACES: dict[str, Callable[[random.Random], list[Text]]] = {
    "never": lambda rng: constant(rng, 0.02),
    "seldom": lambda rng: constant(rng, 0.25),
    "half": lambda rng: constant(rng, 0.5),
    "often": lambda rng: constant(rng, 0.8),
    "always": lambda rng: constant(rng, 0.97),
    "phases": phases,
    "mixture": mixture,
    "drift": drift,
    "sparse": sparse,
}


def synthetic_texts(name: str, seed: int = 0) -> list[Text]:
    """Return one of :data:`TRACES`."""
    return TRACES[name](random.Random(f"{name} {seed}"))

"""Distributions whose partial sums equal p, and the number of tokens that exact arithmetic keeps of them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from hypothesis import strategies as st


@dataclass(frozen=True)
class Nucleus:
    """Probabilities ``weights[i] / sum(weights)``, the top-p option, and how many tokens stay."""

    weights: tuple[int, ...]
    top_p: float
    kept: int

    def scores(self, vocab: int = 0) -> torch.Tensor:
        """Log-probabilities ``[1, 1, V]``; ids after the weights cannot be chosen."""
        total = sum(self.weights)
        logs = [math.log(weight / total) for weight in self.weights]
        return torch.tensor([[logs + [float("-inf")] * (vocab - len(logs))]])

    def ids(self) -> set[int]:
        """Of the tokens that stay; no weights at the border are equal."""
        return {*sorted(range(len(self.weights)), key=lambda i: -self.weights[i])[: self.kept]}


#: Of transformers' tests/generation/test_logits_process.py, test_top_p_dist_warper.
TRANSFORMERS = (
    Nucleus((3, 1, 1, 5), 0.8, 2),
    Nucleus((15, 30, 30, 25), 0.8, 3),
)

#: Float32 holds these probabilities and their sums exactly.
DYADIC = (
    Nucleus((8, 4, 2, 1, 1), 0.5, 1),
    Nucleus((8, 4, 2, 1, 1), 0.75, 2),
    Nucleus((1, 2, 4, 1, 8), 0.875, 3),
    Nucleus((4, 1, 8, 2, 1), 0.25, 1),
    Nucleus((6, 5, 3, 2), 0.6875, 2),
    Nucleus((6, 5, 3, 2), 0.875, 3),
)


@st.composite
def borders(draw: st.DrawFn, *, away: bool = False) -> Nucleus:
    """Distinct weights, and a p that equals a partial sum of the largest, or, with ``away``, lies between two."""
    weights = tuple(draw(st.lists(st.integers(1, 400), min_size=2, max_size=16, unique=True)))
    kept = draw(st.integers(1, len(weights) - 1))
    ordered = sorted(weights, reverse=True)
    reached = Fraction(sum(ordered[:kept]))
    if away:
        reached -= Fraction(ordered[kept - 1], draw(st.integers(2, 10)))
    return Nucleus(weights, float(reached / sum(weights)), kept)

"""Inputs of the ops that choose tokens: random scores and the arguments of draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from speccompile.ops import noise

INF = float("inf")

#: Seeds, positions, stream and start of the noise of a step's rows.
Keys = tuple[torch.Tensor, torch.Tensor, int, torch.Tensor | None]


def random_scores(rows: int, width: int, vocab: int, kept: float, seed: int, coarse: bool = False) -> torch.Tensor:
    """Scores ``[B, T, V]`` of which the share ``kept`` is not -inf; ``coarse`` ones are often equal."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * torch.randn(rows, width + 1, vocab, generator=generator)
    scores = scores.round() if coarse else scores
    scores[torch.rand(scores.shape, generator=generator) >= kept] = -INF
    # A view: each row of the tensor has one position more.
    return scores[:, :width]


def random_keys(rows: int, width: int, seed: int, started: bool, stream: int = noise.DRAFTS) -> Keys:
    """Keys of the noise; those of ``started`` ones include the length at the start of the step."""
    generator = torch.Generator().manual_seed(seed)
    positions = torch.randint(10**5, (rows, width), generator=generator)
    start = positions[:, 0].clone() if started else None
    return torch.randint(noise.SEEDS - 1, (rows,), generator=generator), positions, stream, start


@dataclass(frozen=True)
class ChoiceCase:
    """One choice of tokens.

    Args:
        kept: share of the ids that can be chosen at all.
        broken: one score is NaN.
    """

    rows: int
    width: int
    vocab: int
    temperatures: list[float]
    started: bool
    forbids: bool
    kept: float
    coarse: bool
    broken: bool
    seed: int

    @property
    def first(self) -> int:
        """The first id of a part of the vocabulary."""
        return self.seed % self.vocab

    def scores(self) -> torch.Tensor:
        scores = random_scores(self.rows, self.width, self.vocab, self.kept, self.seed, self.coarse)
        if self.broken:
            scores[self.rows - 1, 0, self.vocab // 2] = float("nan")
        return scores

    def draws(self, stream: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, torch.Tensor | None]:
        """Temperatures, and the keys of the noise."""
        keys = random_keys(self.rows, self.width, self.seed, self.started, stream)
        return torch.tensor(self.temperatures[: self.rows]), *keys


def choice_cases(vocabularies: Sequence[int]) -> st.SearchStrategy[ChoiceCase]:
    return st.builds(
        ChoiceCase,
        rows=st.integers(1, 3),
        width=st.integers(1, 4),
        vocab=st.sampled_from(vocabularies),
        temperatures=st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=3, max_size=3),
        started=st.booleans(),
        forbids=st.booleans(),
        kept=st.sampled_from([0.0, 0.001, 0.1, 1.0]),
        coarse=st.booleans(),
        broken=st.booleans(),
        seed=st.integers(0, 10**6),
    )

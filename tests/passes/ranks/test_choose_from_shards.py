"""The choice from the ranks' parts of the logits, without processes: their parts are gathered here."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.ops import collective
from speccompile.ops.noise import TOKENS
from speccompile.passes.ranks.broadcast_drafts import first_ranks
from speccompile.passes.ranks.choose_from_shards import choose_from_part


def chosen(
    logits: torch.Tensor, ranks: int, patch: pytest.MonkeyPatch, *noise: torch.Tensor, forbids: bool = False
) -> list[torch.Tensor]:
    """What every rank chooses."""
    size = logits.shape[-1]
    count = -(-size // ranks)
    # The last parts are padded with numbers that must not be chosen.
    padded = torch.nn.functional.pad(logits, (0, count * ranks - size), value=1e9)
    parts = padded.split(count, -1)
    sent: list[torch.Tensor] = []

    def record(x: torch.Tensor, group: str, ranks: int) -> torch.Tensor:
        sent.append(x)
        return x.expand(ranks, *x.shape)

    def run() -> list[torch.Tensor]:
        options = {"forbids": forbids, "size": size, "group": "g", "ranks": ranks}
        return [choose_from_part(part, *noise, rank=rank, **options)[0] for rank, part in enumerate(parts)]

    patch.setattr(collective, "_gathered", record)
    run()
    patch.setattr(collective, "_gathered", lambda x, group, ranks: torch.stack(sent))
    return run()


VALUES = st.sampled_from([-1e30, -1.0, 0.0, 0.5, 0.5, 2.0, float("inf"), float("-inf"), float("nan")])


@given(
    ranks=st.integers(2, 4),
    values=st.lists(st.lists(VALUES, min_size=9, max_size=9), min_size=2, max_size=2),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_all_ranks_choose_what_one_rank_chooses(ranks: int, values: list[list[float]], dtype: torch.dtype) -> None:
    logits = torch.tensor([values], dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        for own in chosen(logits, ranks, patch):
            assert torch.equal(own, torch.ops.speccompile.choose(logits))


@given(
    ranks=st.integers(2, 4),
    vocab=st.sampled_from([5, 64, 301]),
    heat=st.lists(st.sampled_from([0.0, 0.7, 1.0]), min_size=2, max_size=2),
    kept=st.sampled_from([0.0, 0.02, 1.0]),
    seed=st.integers(0, 2**40),
)
def test_all_ranks_draw_what_one_rank_draws(ranks: int, vocab: int, heat: list[float], kept: float, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, vocab, generator=rng)
    scores[torch.rand(scores.shape, generator=rng) >= kept] = float("-inf")
    noise = torch.tensor(heat), torch.tensor([seed, 5]), torch.randint(1000, (2, 3), generator=rng)
    expected = torch.ops.speccompile.choose(scores, *noise, TOKENS, forbids=True)
    with pytest.MonkeyPatch.context() as patch:
        for own in chosen(scores, ranks, patch, *noise, forbids=True):
            assert torch.equal(own, expected)


def test_drafts_of_the_first_rank_keep_their_shapes() -> None:
    values = (torch.arange(6).view(2, 3), torch.tensor([3, 1]), torch.arange(8).view(2, 4))
    with collective.alone():
        for before, after in zip(values, first_ranks(*values, group="g", ranks=2), strict=True):
            assert torch.equal(before, after)

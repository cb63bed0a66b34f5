"""Draws with filters, and the scores that filters leave, against their definitions (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops import noise
from speccompile.ops.triton.choose import SPAN
from speccompile.ops.triton.draw import Filters, draw, filter_logits
from speccompile.sampling import filters as definition
from support import triton_interpreter  # noqa: F401

NEUTRAL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


def state_of(slots: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Options of each slot, in every combination over many seeds."""

    def one_of(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (slots,), generator=generator)]

    return {
        "temperature": one_of(0.0, 0.7, 1.0, 1.3),
        "top_k": one_of(0, 1, 20),
        "top_p": one_of(1.0, 0.9, 0.2),
        "min_p": one_of(0.0, 0.05),
    }


@settings(deadline=None, max_examples=8, phases=[Phase.explicit, Phase.generate])
@given(
    width=st.integers(1, 3),
    vocab=st.sampled_from([1, 100, SPAN, SPAN + 3]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    tree=st.booleans(),
    broken=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_tokens_and_scores_are_the_defined_ones(
    width: int, vocab: int, dtype: torch.dtype, tree: bool, broken: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots, rows = torch.tensor([4, 0, 2]), 3
    # After the places that are looked at stand others.
    logits = (3 * torch.randn(rows, width + 1, vocab, generator=generator)).to(dtype)
    if broken:
        logits[1, 0, vocab // 2] = float("nan")
        logits[2, 0] = float("-inf")
    logits = logits[:, :width]
    options = state_of(5, generator)
    length = torch.randint(10**5, (5,), generator=generator)
    seeds = torch.randint(noise.SEEDS - 1, (5,), generator=generator)
    depths = torch.randint(4, (rows, width), generator=generator) if tree else None
    own = Filters(slots, **options)
    got = draw(logits, own, length, depths, seeds)
    assert torch.equal(got, definition.draw_filtered(logits, slots, *options.values(), length, seeds, depths))
    if not broken:
        assert torch.equal(filter_logits(logits, own), definition.filter_logits(logits, slots, *options.values()))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_rows_without_filters_keep_all_scores(temperature: float) -> None:
    logits, slots = torch.randn(2, 1, 100), torch.tensor([1, 0])
    options = [torch.full((2,), value) for value in (temperature, *NEUTRAL.values())]
    scores = filter_logits(logits, Filters(slots, *options))
    assert torch.equal(scores, logits / (temperature or 1.0))

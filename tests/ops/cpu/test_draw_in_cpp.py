"""Draws with filters in C++: the tokens and the scores that the processors leave, one after the other.

``test_other_cpus.py`` runs this file again for CPUs with less than this one.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops import greatest, noise
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.sampling import filters
from support.choice_cases import INF, random_scores

ops = torch.ops.speccompile
SLOTS = 5
# Around the sizes of vectors, of the first search of top-p, and of what one thread takes (16,384).
VOCABULARIES = [1, 15, 65, 256, 257, 1000, 4097, 16385]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def options_of_slots(generator: torch.Generator) -> list[torch.Tensor]:
    """Temperature, top_k, top_p and min_p of each slot, in every combination over many seeds."""

    def one_of(*values: float) -> torch.Tensor:
        return torch.tensor(values)[torch.randint(len(values), (SLOTS,), generator=generator)]

    top_k = one_of(0, 1, 20, 300, 10**6)
    return [one_of(0.0, 0.7, 1.0, 40.0), top_k, one_of(1.0, 0.95, 0.2, 0.0), one_of(0.0, 0.05, 1.0)]


@settings(max_examples=60, deadline=None)
@given(
    width=st.integers(1, 3),
    vocab=st.sampled_from(VOCABULARIES),
    dtype=st.sampled_from(DTYPES),
    kept=st.sampled_from([0.0, 0.01, 1.0]),
    coarse=st.booleans(),
    tree=st.booleans(),
    broken=st.booleans(),
    without=st.sampled_from([(), ("top_k",), ("top_k", "top_p", "min_p")]),
    divided=st.booleans(),
    seed=st.integers(0, 10**6),
)
def test_tokens_and_scores_are_the_defined_ones(
    width: int,
    vocab: int,
    dtype: torch.dtype,
    kept: float,
    coarse: bool,
    tree: bool,
    broken: bool,
    without: tuple[str, ...],
    divided: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    slots, rows = torch.tensor([4, 0, 2]), 3
    logits = random_scores(rows, width, vocab, kept, seed, coarse).to(dtype)
    if broken:
        logits[1, 0, vocab // 2] = float("nan")
    before = logits.clone()
    options = options_of_slots(generator)
    length = torch.randint(10**5, (SLOTS,), generator=generator)
    seeds = torch.randint(noise.SEEDS - 1, (SLOTS,), generator=generator)
    depths = torch.randint(4, (rows, width), generator=generator) if tree else None
    scores = filters.filter_logits(logits, slots, *options)
    torch.testing.assert_close(ops.filter_logits(logits, slots, *options), scores, rtol=0, atol=0, equal_nan=True)
    names = ("temperature", "top_k", "top_p", "min_p")
    own = [None if name in without else option for name, option in zip(names, options, strict=True)]
    given_all = (logits, slots, *own, length, seeds, depths, divided)
    assert torch.equal(ops.draw_filtered(*given_all), filters.draw_filtered(*given_all))
    torch.testing.assert_close(logits, before, rtol=0, atol=0, equal_nan=True, msg="logits are read only")


@settings(max_examples=60, deadline=None)
@given(
    vocab=st.sampled_from(VOCABULARIES),
    kept=st.sampled_from([0.01, 1.0]),
    coarse=st.booleans(),
    spread=st.sampled_from([0.01, 1.0, 10.0]),
    seed=st.integers(0, 10**6),
)
def test_thresholds_keep_what_the_definition_keeps(
    vocab: int, kept: float, coarse: bool, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = (spread * random_scores(3, 2, vocab, kept, seed, coarse)).contiguous()
    for option in (torch.tensor([1.0, 0.9, 0.1]), torch.rand(3, generator=generator)):
        for name in ("top_p_threshold", "min_p_threshold"):
            found = getattr(ops, name)(scores, option)
            wanted = getattr(greatest, name)(scores, option)
            assert torch.equal(found.isneginf(), wanted.isneginf())
            if name == "min_p_threshold":
                torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
            else:
                # A score of these. Last bits of exponentials may differ, and a border may lie between them.
                assert (found == wanted).float().mean() > 0.8


def test_a_row_has_the_same_bits_beside_any_others() -> None:
    logits = random_scores(4, 3, 20000, 1.0, 0)
    generator = torch.Generator().manual_seed(0)
    options, slots = options_of_slots(generator), torch.tensor([4, 0, 2, 1])
    length, seeds = torch.arange(SLOTS), torch.arange(SLOTS)
    together = ops.draw_filtered(logits, slots, *options, length, seeds)
    threads = torch.get_num_threads()
    for count in (1, 3):
        torch.set_num_threads(count)
        alone = [ops.draw_filtered(logits[i : i + 1], slots[i : i + 1], *options, length, seeds) for i in range(4)]
        assert torch.equal(torch.cat(alone), together)
    torch.set_num_threads(threads)


def test_nothing_to_draw_from_is_no_token() -> None:
    logits = torch.full((1, 2, 300), -INF)
    logits[0, 1, 5] = 1.0
    state = torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.zeros(1)
    zero = torch.zeros(1, dtype=torch.int64)
    assert ops.draw_filtered(logits, zero, *state, zero, zero).tolist() == [[-1, 5]]


def test_state_of_another_dtype_is_refused() -> None:
    zero = torch.zeros(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="float32, side by side"):
        ops.draw_filtered(torch.zeros(1, 1, 8), zero, zero, None, None, None, zero, zero)

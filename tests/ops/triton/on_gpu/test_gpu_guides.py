"""Guides on a GPU: tokens that are forbidden, states after a commit, and drafts that are left."""

from __future__ import annotations

import pytest
import torch

from speccompile.sampling.automata import advance, allowed_lens
from speccompile.sampling.base import IMPLEMENTATIONS
from support.gpu import on_gpu
from support.processor_cases import SLOTS, automata_from

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile
CAPACITY, ROWS, WIDTH, SEEDS = 40, 3, 4, range(8)


@pytest.mark.parametrize("drafted", [0, 1, 3])
@pytest.mark.parametrize("vocab", [70, 49152, 128256])
def test_forbidden_tokens(vocab: int, drafted: int) -> None:
    """Tokens of drafts may lead nowhere, and a slot may have no guide."""
    for seed in SEEDS:
        slots, states, tables, integers = automata_from(seed, ROWS, vocab)
        context, length = integers(vocab, ROWS, CAPACITY), 12 + integers(4, ROWS)
        # After the places that are looked at stand others; half of the scores are forbidden already.
        scores = (integers(1000, ROWS, WIDTH + 1, vocab) - 500) * 0.013
        scores[scores < 0] = float("-inf")
        expected, got = scores.clone(), scores.cuda()
        IMPLEMENTATIONS["guide_"].call(expected[:, :WIDTH], context, length, drafted, [slots, states, *tables])
        ops.guide_(got[:, :WIDTH], *on_gpu(context, length), drafted, list(on_gpu(slots, states, *tables)))
        assert torch.equal(got.cpu(), expected)


def test_states_after_a_commit() -> None:
    for seed in SEEDS:
        slots, states, tables, integers = automata_from(seed, ROWS)
        tokens, length = integers(70, SLOTS, CAPACITY), 12 + integers(4, SLOTS)
        emitted = integers(WIDTH + 1, SLOTS)
        expected, moved = states.clone(), states.cuda()
        advance(expected, slots, tokens, length, emitted, WIDTH, tables)
        ops.advance_guide_(moved, *on_gpu(slots, tokens, length, emitted), WIDTH, list(on_gpu(*tables)))
        assert torch.equal(moved.cpu(), expected)


def test_drafts_that_a_guide_leaves() -> None:
    for seed in SEEDS:
        slots, states, tables, integers = automata_from(seed, ROWS)
        drafts, lens = integers(71, SLOTS, WIDTH) - 1, integers(WIDTH + 1, SLOTS)
        expected, cut = lens.clone(), lens.cuda()
        allowed_lens(expected, slots, drafts, states, tables)
        ops.truncate_drafts_(cut, *on_gpu(slots, drafts, states), list(on_gpu(*tables)))
        assert torch.equal(cut.cpu(), expected)

"""Tokens that a bit mask forbids, in C++ as by the definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops import keep_allowed
from speccompile.ops.cpu.library import load_cpu_ops


@settings(max_examples=40, deadline=None)
@given(vocab=st.integers(1, 70), seed=st.integers(0, 2**16), dtype=st.sampled_from(["float32", "bfloat16", "float16"]))
def test_scores_are_the_defined_ones(vocab: int, seed: int, dtype: str) -> None:
    assert load_cpu_ops() is None
    random = torch.Generator().manual_seed(seed)
    # Whole bytes of allowed and of forbidden tokens, too.
    bits = torch.randint(0, 256, (-(-vocab // 8),), generator=random, dtype=torch.uint8)
    bits[torch.rand(bits.shape, generator=random) < 0.3] = 0
    bits[torch.rand(bits.shape, generator=random) < 0.3] = 255
    scores = torch.randn(2, vocab, generator=random).to(getattr(torch, dtype))
    scores[0, 0] = float("nan")
    wanted = scores.clone()
    keep_allowed.reference(wanted[0], bits)
    torch.ops.speccompile.keep_allowed_(scores[0], bits)
    torch.testing.assert_close(scores, wanted, rtol=0, atol=0, equal_nan=True)
    allowed = [token for token in range(vocab) if bits[token // 8] >> token % 8 & 1]
    assert scores[0].isneginf().logical_not().nonzero().flatten().tolist() == allowed


def test_a_mask_of_another_size_is_an_error() -> None:
    assert load_cpu_ops() is None
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        torch.ops.speccompile.keep_allowed_(torch.zeros(17), torch.zeros(2, dtype=torch.uint8))

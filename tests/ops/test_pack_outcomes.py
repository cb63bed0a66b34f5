"""Comparison of the C++ op with its reference."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.pack_outcomes import reference


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


@settings(max_examples=50, deadline=None)
@given(slots=st.integers(1, 5), width=st.integers(1, 4), others=st.integers(0, 7), seed=st.integers(0, 2**30))
def test_the_c_plus_plus_op(slots: int, width: int, others: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    emitted, accepted, proposed = (torch.randint(0, 5, (slots,), generator=generator) for _ in range(3))
    length = torch.randint(5, 12, (slots,), generator=generator)
    tokens = torch.randint(0, 99, (slots, 12 + width), generator=generator)
    extra = [length + 1, torch.randn(slots, 3, generator=generator), torch.arange(2 * slots).reshape(slots, 2)]
    chosen = [tensor for bit, tensor in enumerate(extra) if others >> bit & 1]
    arguments = emitted, accepted, proposed, emitted > 1, length, tokens, width, chosen
    assert torch.equal(torch.ops.speccompile.pack_outcomes(*arguments), reference(*arguments))

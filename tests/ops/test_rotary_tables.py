"""Comparison of the C++ op of rotary tables with its reference, and with transformers' own tables."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.rotary_tables import reference


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


@pytest.mark.parametrize("scaling", [1.0, 1.19])
@pytest.mark.parametrize("positions", [[[0]], [[5, 6, 131071], [0, 1, 2]]])
def test_tables(positions: list[list[int]], scaling: float) -> None:
    table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32))
    table.attention_scaling = scaling
    places = torch.tensor(positions)
    expected = table(torch.zeros(1), places)
    own = reference(places, table.inv_freq, scaling)
    made = torch.ops.speccompile.native_rotary_tables(places, table.inv_freq, scaling)
    for mine, given, theirs in zip(made, own, expected, strict=True):
        torch.testing.assert_close(given, theirs, rtol=0, atol=0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=3e-7)


def test_a_position_has_the_same_bits_beside_any_others() -> None:
    table = LlamaRotaryEmbedding(LlamaConfig(hidden_size=64, num_attention_heads=2, head_dim=32))
    places = torch.arange(100, 228).reshape(2, 64).t()
    whole = torch.ops.speccompile.native_rotary_tables(places, table.inv_freq, 1.0)
    for row, column in ((0, 0), (37, 1), (63, 1)):
        alone = torch.ops.speccompile.native_rotary_tables(places[row, column].view(1, 1), table.inv_freq, 1.0)
        assert all(torch.equal(one[0, 0], all_[row, column]) for one, all_ in zip(alone, whole, strict=True))


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"positions are \[B, T\], and frequencies float32"):
        torch.ops.speccompile.native_rotary_tables(torch.zeros(3, dtype=torch.int64), torch.ones(4), 1.0)

"""Linears of chosen experts: the kernels against their definition (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops.expert_linear import reference
from speccompile.ops.triton.expert_linear import expert_linear
from support import triton_interpreter  # noqa: F401
from support.experts import case


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("own", [False, True], ids=["one input", "an input each"])
@pytest.mark.parametrize("tokens", [1, 23])
def test_each_pair_is_multiplied_by_its_expert(tokens: int, own: bool, transposed: bool) -> None:
    """Two of four experts have most of the pairs, more than a tile has rows; one choice in five is no expert."""
    given = case(tokens, own=own, transposed=transposed, biased=tokens == 23, depth=70, features=67)
    torch.testing.assert_close(expert_linear(*given), reference(*given), rtol=1e-4, atol=1e-4)


def test_a_pair_has_the_same_bits_in_any_company() -> None:
    x, experts, *rest = case(9, own=False, transposed=False, biased=True)
    whole = expert_linear(x, experts, *rest)
    for token in range(9):
        at = slice(token, token + 1)
        assert torch.equal(expert_linear(x[at], experts[at], *rest), whole[at])

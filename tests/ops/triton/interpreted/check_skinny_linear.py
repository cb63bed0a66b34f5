"""Linears over few rows: the kernel against its definition (run by test_interpreted.py)."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops.skinny_linear import reference
from speccompile.ops.triton.skinny_linear import MOST_ROWS, skinny_linear
from support import triton_interpreter  # noqa: F401


@pytest.mark.parametrize("shape", [(1, 1), (2, 8), (17, 1)], ids=["one row", "16 rows", "rows for torch's product"])
@pytest.mark.parametrize(("depth", "features"), [(96, 50), (520, 20)])
@pytest.mark.parametrize("biased", [False, True])
def test_rows_are_multiplied(shape: tuple[int, int], depth: int, features: int, biased: bool) -> None:
    generator = torch.Generator().manual_seed(depth)
    x = torch.randn(*shape, depth, generator=generator)
    weight = torch.randn(features, depth, generator=generator)
    bias = torch.randn(features, generator=generator) if biased else None
    torch.testing.assert_close(skinny_linear(x, weight, bias), reference(x, weight, bias), rtol=1e-5, atol=1e-4)


def test_inputs_may_have_gaps_between_rows() -> None:
    x, weight = torch.randn(3, 200)[:, 40:136], torch.randn(33, 96)
    torch.testing.assert_close(skinny_linear(x, weight), reference(x, weight), rtol=1e-5, atol=1e-4)


def test_a_row_has_the_same_bits_in_any_company() -> None:
    x, weight = torch.randn(MOST_ROWS, 96), torch.randn(33, 96)
    whole = skinny_linear(x, weight)
    for rows in (slice(0, 1), slice(3, 9), slice(15, 16)):
        assert torch.equal(skinny_linear(x[rows], weight), whole[rows])

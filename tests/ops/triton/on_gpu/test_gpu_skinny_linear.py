"""Linears over few rows on a GPU equal torch's product, and a row has the same bits in any company."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("depth", "features"), [(576, 1536), (4096, 6144), (1537, 70)])
@pytest.mark.parametrize("biased", [False, True])
def test_few_rows(dtype: torch.dtype, depth: int, features: int, biased: bool) -> None:
    generator = torch.Generator("cuda").manual_seed(depth)
    x = torch.randn(2, 8, depth, generator=generator, device="cuda").to(dtype)
    weight = torch.randn(features, depth, generator=generator, device="cuda").mul(depth**-0.5).to(dtype)
    bias = torch.randn(features, generator=generator, device="cuda").to(dtype) if biased else None
    got = ops.skinny_linear(x, weight, bias)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    # One rounding, of the result.
    assert ((got - wanted).norm() / wanted.norm()).item() < 2 * torch.finfo(dtype).eps
    for row, place in ((0, 0), (1, 3), (1, 7)):
        alone = ops.skinny_linear(x[row : row + 1, place : place + 1], weight, bias)
        assert torch.equal(alone[0, 0], got[row, place])
    many = x.repeat(8, 1, 1)
    assert torch.equal(ops.skinny_linear(many, weight, bias), F.linear(many, weight, bias))

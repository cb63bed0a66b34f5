"""Linears of experts on a GPU equal their reference."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops import expert_linear as expert_op
from support.experts import case
from support.gpu import TOLERANCE

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_linears_of_experts(dtype: torch.dtype, transposed: bool) -> None:
    """A pair's bits are the same in any company."""
    given = case(40, own=True, transposed=transposed, biased=True, depth=200, features=130, dtype=dtype)
    x, experts, weight, bias = (None if item is None else item.cuda() for item in given[:-1])
    got = ops.expert_linear(x, experts, weight, bias, transposed)
    torch.testing.assert_close(got.cpu(), expert_op.reference(*given), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert x is not None and experts is not None
    assert torch.equal(ops.expert_linear(x[3:4], experts[3:4], weight, bias, transposed), got[3:4])

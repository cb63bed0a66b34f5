"""Collectives within one process; ``tests/ranks`` has two."""

from __future__ import annotations

import pytest
import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import RankLost
from speccompile.ops import collective
from speccompile.utils.torch_private import dispatch_table
from support.errors import raises

ops = torch.ops.speccompile


def test_a_group_that_is_not_connected_is_a_named_error() -> None:
    with raises(RankLost, during="a step"):
        ops.all_reduce(torch.ones(2), "nobody", 2)


def test_alone_every_rank_counts_as_this_one() -> None:
    x = torch.arange(6.0).view(2, 3)
    with collective.alone():
        assert torch.equal(ops.all_reduce(x, "g", 3), 3 * x)
        assert torch.equal(ops.all_gather(x, 5, "g", 2), torch.cat([x, x], 1)[:, :5])
        assert torch.equal(ops.broadcast(x, "g", 2), x)
    with raises(RankLost):
        ops.broadcast(x, "g", 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_made_in_the_order_of_the_ranks(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = torch.randn(4, 2, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    monkeypatch.setattr(collective, "_gathered", lambda x, group, ranks: parts)
    whole = ops.all_reduce(parts[0], "g", 4)
    expected = (((parts[0].float() + parts[1]) + parts[2]) + parts[3]).to(dtype)
    assert whole.dtype == dtype and torch.equal(whole, expected)
    # A row has the same bits among others and alone.
    monkeypatch.setattr(collective, "_gathered", lambda x, group, ranks: parts[:, :1])
    assert torch.equal(ops.all_reduce(parts[0, :1], "g", 4), whole[:1])


def test_an_op_takes_and_returns_what_its_fake_says() -> None:
    x = torch.randn(2, 3, 4).transpose(0, 1)
    with collective.alone():
        for op, arguments in ((ops.all_reduce, ("g", 2)), (ops.all_gather, (7, "g", 2)), (ops.broadcast, ("g", 2))):
            torch.library.opcheck(op, (x, *arguments), test_utils=("test_schema", "test_faketensor"))


def test_on_cuda_the_group_sums_unless_a_rank_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Called here on tensors of a CPU: a machine without a GPU cannot dispatch to it."""
    assert "\nCUDA: registered at" in dispatch_table("speccompile::all_reduce")
    summed = []
    monkeypatch.setattr(collective, "_group", lambda name: name)
    monkeypatch.setattr(collective.dist, "all_reduce", lambda x, group: summed.append(group) or x.mul_(3))
    x = torch.ones(3, 2).T
    total = collective._all_reduce_on_cuda(x, "g", 3)
    assert torch.equal(total, 3 * x) and total.is_contiguous() and summed == ["g"]
    with collective.alone():
        assert torch.equal(collective._all_reduce_on_cuda(x, "g", 4), 4 * x) and summed == ["g"]

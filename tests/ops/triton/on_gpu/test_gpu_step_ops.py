"""Inputs, the n-gram match, its storing and the commit on a GPU equal their references."""

from __future__ import annotations

import pytest
import torch

from speccompile.ops import commit as commit_op
from speccompile.ops import ngram as ngram_op
from speccompile.ops import step_inputs as inputs_op
from speccompile.ops import store_drafts as store_op
from support.gpu import on_gpu
from support.input_cases import input_cases, stored_cases

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


def test_ngram_match() -> None:
    generator = torch.Generator().manual_seed(2)
    tokens = torch.randint(3, (9, 5000), generator=generator)
    length = torch.randint(5001, (9,), generator=generator)
    slots = torch.tensor([8, 0, 3, 5])
    wanted = ngram_op.reference(tokens, length, slots, 3, 1, 15)
    got = ops.match_ngram(*on_gpu(tokens, length, slots), 3, 1, 15)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("counted", [False, True])
def test_accept_and_commit(counted: bool) -> None:
    generator = torch.Generator().manual_seed(3)

    def whole(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for drafted in (0, 1, 7, 15):
        length = whole(1, 30, 40)
        state = [whole(0, 3, 40, 64), length, length + whole(1, 20, 40), whole(0, 4, 40) > 0, whole(-1, 9, 40, 4)]
        state += [whole(0, 9, 40) for _ in range(3)]
        drafts, lens = whole(0, 3, 32, drafted), whole(0, drafted + 1, 32)
        judged = (torch.minimum(whole(0, drafted + 1, 32), lens), None) if counted else (None, drafts)
        rest = [torch.randperm(40, generator=generator)[:32], whole(-1, 3, 32, drafted + 1), lens, *judged]
        there = [None if item is None else item.cuda() for item in (*state, *rest)]
        here = [None if item is None else item.clone() for item in (*state, *rest)]
        commit_op.reference(*here)
        ops.accept_commit_(*there)
        for one, other in zip(there, here, strict=True):
            assert one is None or torch.equal(one.cpu(), other)


def test_inputs_of_a_step() -> None:
    for given in input_cases():
        wanted = inputs_op.reference(*given)  # type: ignore[arg-type]
        got = ops.step_inputs(*[item.cuda() if isinstance(item, torch.Tensor) else item for item in given])
        assert all(torch.equal(one.cpu(), other) for one, other in zip(got, wanted, strict=True))


def test_stored_drafts() -> None:
    for given in stored_cases():
        tensors = on_gpu(*given)
        ops.store_drafts_(*tensors)
        store_op.reference(*given)
        assert all(torch.equal(one.cpu(), other) for one, other in zip(tensors, given, strict=True))

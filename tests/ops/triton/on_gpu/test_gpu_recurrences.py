"""Recurrences on a GPU equal their references, outputs and states."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from support.gpu import on_gpu
from support.recurrences import PROBLEMS, Slots

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_recurrences(make: Any) -> None:
    """Two steps: a prompt, then drafts after it. Kept inputs and states are those of the reference."""
    problem = make(length=12)
    slots = Slots(problem, "")
    state = [] if slots.state is None else [slots.state]
    copies = [tensor.cuda() for tensor in (*state, slots.kept)]
    op = getattr(ops, f"{problem.op}_")
    for first, absorbed, settled in ((0, 0, 7), (7, 7, 7)):
        places = [item[:, first : first + (7 if first == 0 else 5)] for item in problem.places]
        given = [(*places, *problem.fixed)[index] for index in problem.order]
        positions = torch.arange(first, first + places[0].shape[1]).repeat(2, 1)
        stands = [torch.tensor([absorbed] * 2)] if state else []
        cursor = [torch.tensor([2, 0]), positions, *stands, torch.tensor([settled] * 2)]
        wanted = op(*given, *state, slots.kept, *cursor)
        moved = [None if item is None else item.cuda() for item in given]
        got = op(*moved, *copies, *on_gpu(*cursor))
        torch.testing.assert_close(got.cpu(), wanted)
        for copy, own in zip(copies, (*state, slots.kept), strict=True):
            torch.testing.assert_close(copy.cpu(), own, equal_nan=True)

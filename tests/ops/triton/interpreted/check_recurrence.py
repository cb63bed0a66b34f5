"""Recurrences as kernels against the functions that define them (run by test_interpreted.py)."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from speccompile.ops.triton.causal_conv import causal_conv
from speccompile.ops.triton.gated_delta_rule import gated_delta_rule
from speccompile.ops.triton.selective_scan import selective_scan
from support import triton_interpreter  # noqa: F401
from support.recurrences import PROBLEMS, WIDEST, Problem, Slots

KERNELS: dict[str, Callable[..., torch.Tensor]] = {
    "causal_conv": causal_conv,
    "gated_delta_rule": gated_delta_rule,
    "selective_scan": selective_scan,
}


class KernelSlots(Slots):
    """Slots that a kernel steps through their texts."""

    def op(self) -> Callable[..., torch.Tensor]:
        return KERNELS[self.problem.op]


def cut(problem: Problem, first: list[int], width: int) -> list[torch.Tensor]:
    """A copy of ``width`` places of each row, from its own first one on."""
    return [
        torch.stack([item[row, at : at + width] for row, at in enumerate(first)]).clone() for item in problem.places
    ]


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_over_any_steps_results_state_and_kept_inputs_are_those_of_the_reference(make: Any) -> None:
    """Padded prompt chunks, then drafts of which some are accepted; what was not is NaN. Rows stand at places of their
    own, and share a step."""
    choose, problem = random.Random(0), make(length=30)
    both = Slots(problem, ""), KernelSlots(problem, "")
    slots, absorbed, first = [2, 0], [0, 0], [0, 0]
    for step in range(6):
        prompt, width = step < 2, choose.randint(1, WIDEST)
        places = cut(problem, first, width)
        right = [choose.randint(1, width) for _ in first]
        for item in places:
            for row, count in enumerate(right):
                item[row, count:] = torch.nan
        settled = [at + count if prompt else at for at, count in zip(first, right, strict=True)]
        expected, found = (side.step(places, slots, first, absorbed, settled) for side in both)
        torch.testing.assert_close(found, expected, equal_nan=True)
        for reference, kernel in ((both[0].state, both[1].state), (both[0].kept, both[1].kept)):
            if reference is not None:
                torch.testing.assert_close(kernel, reference, equal_nan=True)
        absorbed, first = settled, [at + count for at, count in zip(first, right, strict=True)]


@pytest.mark.parametrize("make", PROBLEMS.values(), ids=PROBLEMS.keys())
def test_a_text_at_once_and_token_by_token_have_the_same_bits(make: Any) -> None:
    problem = make(length=7)
    together = KernelSlots(problem, "").step(problem.places, [1, 0], [0, 0], [0, 0], [7, 7])
    alone = KernelSlots(problem, "")
    for place in range(7):
        result = alone.step(cut(problem, [place] * 2, 1), [1, 0], [place] * 2, [max(0, place - 1)] * 2, [place] * 2)
        assert torch.equal(result[:, 0], together[:, place])

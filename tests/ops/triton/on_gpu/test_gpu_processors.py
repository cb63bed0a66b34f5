"""Sampling processors on a GPU leave the scores of their definitions."""

from __future__ import annotations

import pytest
import torch

from speccompile.sampling.base import IMPLEMENTATIONS
from support.processor_cases import STATE, VOCAB, integers_from

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("name", STATE)
def test_processors(name: str) -> None:
    for seed in range(8):
        integers, rows, width = integers_from(seed), 3, 2
        state = STATE[name](integers, rows)
        context, length = integers(4, rows, 40), 12 + integers(4, rows)
        scores = (integers(1000, rows, width, VOCAB) - 500) * 0.013
        expected, got = scores.clone(), scores.cuda()
        processor = IMPLEMENTATIONS[f"{name}_"]
        processor.call(expected, context, length, 0, state)
        op = getattr(torch.ops.speccompile, f"{name}_")
        op(got, context.cuda(), length.cuda(), 0, [item.cuda() for item in state])
        torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)

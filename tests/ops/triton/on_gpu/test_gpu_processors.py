"""Sampling processors on a GPU leave the scores of their definitions."""

from __future__ import annotations

import pytest
import torch

from speccompile.sampling.base import IMPLEMENTATIONS
from support.processor_cases import STATE, STATE_OF_WORDS, VOCAB, WORD_TOKENS, integers_from

pytestmark = pytest.mark.gpu


def assert_leaves_the_scores_of_its_definition(
    name: str, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, state: list[torch.Tensor]
) -> None:
    expected, got = scores.clone(), scores.cuda()
    IMPLEMENTATIONS[f"{name}_"].call(expected, context, length, 0, state)
    op = getattr(torch.ops.speccompile, f"{name}_")
    op(got, context.cuda(), length.cuda(), 0, [item.cuda() for item in state])
    torch.testing.assert_close(got.cpu(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", [*STATE, *STATE_OF_WORDS])
def test_processors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.sampling.sequences.WORD_TOKENS", WORD_TOKENS)
    for seed in range(8):
        integers, rows, width = integers_from(seed), 3, 2
        state = (STATE | STATE_OF_WORDS)[name](integers, rows)
        context, length = integers(4, rows, 40), 12 + integers(4, rows)
        scores = (integers(1000, rows, width, VOCAB) - 500) * 0.013
        assert_leaves_the_scores_of_its_definition(name, scores, context, length, state)


@pytest.mark.parametrize("vocab", [VOCAB, 128256])
@pytest.mark.parametrize(
    ("name", "values"),
    [("typical_p", [0.3141, 0.777, 1.0]), ("renormalize_logits", [True, False, True])],
    ids=["typical_p", "renormalize_logits"],
)
def test_processors_that_read_whole_rows(name: str, values: list[float], vocab: int) -> None:
    integers, nothing = integers_from(vocab), torch.zeros(3, 1, dtype=torch.int64)
    # Of few levels, so that no rounding moves a threshold.
    scores = (integers(21, 3, 2, vocab) - 10) * 0.3
    scores[integers(5, 3, 2, vocab) == 0] = float("-inf")
    assert_leaves_the_scores_of_its_definition(name, scores, nothing, nothing[:, 0], [torch.tensor(values)])

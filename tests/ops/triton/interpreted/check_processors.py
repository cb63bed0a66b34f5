"""Each processor's kernels against the processor itself (run by test_interpreted.py)."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile.ops.on_cuda import cuda_kernel
from speccompile.ops.triton import cutoffs, normalization, penalties, sequences, token_lists
from speccompile.sampling.base import IMPLEMENTATIONS, Processor
from speccompile.sampling.pipeline import HOST_PROCESSORS, PROCESSORS, WATERMARK
from support import triton_interpreter  # noqa: F401
from support.processor_cases import (
    STATE,
    STATE_OF_WORDS,
    VOCAB,
    WORD_TOKENS,
    Numbers,
    integers_from,
)

CAPACITY = 40


@pytest.fixture(scope="module", autouse=True)
def small_blocks() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        for module in (token_lists, penalties):
            patch.setattr(module, "SPAN", 32)
        for module in (penalties, sequences):
            patch.setattr(module, "PLACES", 16)
        for module in (cutoffs, normalization):
            patch.setattr(module, "BLOCK", 32)
        yield


def check(
    processor: Processor,
    rows: int,
    width: int,
    drafted: int,
    state: list[torch.Tensor],
    integers: Numbers,
) -> None:
    kernel = cuda_kernel(processor.op)
    assert kernel is not None
    # Few tokens, so that they occur again.
    context, length = integers(4, rows, CAPACITY), 12 + integers(4, rows)
    # After the places that are looked at stand others.
    scores = (integers(1000, rows, width + 1, VOCAB) - 500) * 0.013
    got, expected = scores.clone()[:, :width], scores.clone()[:, :width]
    kernel(got, context, length, drafted, state)
    processor.call(expected, context, length, drafted, state)
    assert torch.equal(got, expected)


generated = settings(deadline=None, max_examples=4, phases=[Phase.explicit, Phase.generate])
SIZES = {"rows": st.integers(1, 3), "width": st.integers(1, 3), "seed": st.integers(0, 10**6)}


@pytest.mark.parametrize("name", STATE)
@generated
@given(**SIZES)
def test_processors(name: str, rows: int, width: int, seed: int) -> None:
    integers = integers_from(seed)
    check(IMPLEMENTATIONS[f"{name}_"], rows, width, 0, STATE[name](integers, rows), integers)


@pytest.mark.parametrize("name", STATE_OF_WORDS)
@generated
@given(**SIZES)
def test_processors_of_words(name: str, rows: int, width: int, seed: int) -> None:
    integers = integers_from(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("speccompile.sampling.sequences.WORD_TOKENS", WORD_TOKENS)
        check(IMPLEMENTATIONS[f"{name}_"], rows, width, 0, STATE_OF_WORDS[name](integers, rows), integers)


@pytest.mark.parametrize("name", ["remove_invalid_values_", "renormalize_logits_"])
def test_rows_that_are_not_finite(name: str) -> None:
    inf, nan = float("inf"), float("nan")
    rows = [[-inf, 1.5, 2.0], [-inf] * 3, [1.0, inf, -inf], [1.0, nan, 2.0], [0.5, 0.5, -3.0]]
    scores = torch.tensor(rows)[:, None]
    nothing = torch.zeros(len(rows), 1, dtype=torch.int64)
    processor, wanted = IMPLEMENTATIONS[name], torch.tensor([True] * 5)
    kernel = cuda_kernel(processor.op)
    assert kernel is not None
    got, expected = scores.clone(), scores.clone()
    kernel(got, nothing, nothing[:, 0], 0, [wanted])
    processor.call(expected, nothing, nothing[:, 0], 0, [wanted])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6, equal_nan=True)
    kernel(scores, nothing, nothing[:, 0], 0, [~wanted])
    assert scores.isnan().sum() == 1 and scores.isinf().sum() == 6, "rows without the option stay"


def test_every_processor_that_cuda_can_run_has_kernels() -> None:
    own = {item.name for item in PROCESSORS if cuda_kernel(item.op) is None}
    assert own == {"guide", *(item.name for item in (*HOST_PROCESSORS, *WATERMARK))}

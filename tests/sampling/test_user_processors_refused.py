"""Which of a user's own logits processors cannot become part of a step, and what is said of them."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor
from transformers.generation import logits_process as hf

from speccompile.errors import InvalidOption, UnsupportedProcessor
from speccompile.sampling.user_check import check_processors
from support.errors import raises
from support.users_processors import MAKE, MAX_LEN, VOCAB, AfterLast, wrapped


class CountsTokens(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - 0.01 * torch.zeros_like(scores).scatter_add(1, input_ids, torch.ones_like(input_ids).float())


class CountsCalls(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return scores + self.calls


class Remembers(LogitsProcessor):
    """Its result is the same as ever."""

    def __init__(self) -> None:
        self.seen: dict[str, list[int]] = {"lengths": []}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.seen["lengths"].append(input_ids.shape[1])
        return scores


class CountsInATensor(LogitsProcessor):
    def __init__(self) -> None:
        self.count = torch.zeros(())

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return scores


class Caches(LogitsProcessor):
    """Made anew for another shape: in a trace it would keep a fake."""

    def __init__(self) -> None:
        self.zeros = torch.zeros(0)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > MAX_LEN:
            self.zeros = torch.zeros_like(scores)
        return scores


def branches(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + 1 if (input_ids[:, -1] == 3).any() else scores


def loops(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    for row, ids in enumerate(input_ids.tolist()):
        scores[row, ids[-1]] = -math.inf
    return scores


def loops_over_rows(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.stack([line + 1 for line in scores])


def masks(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    scores[scores > 0] -= 1
    return scores


def numpys(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(scores.numpy() + 1)


def draws(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + torch.rand_like(scores)


def mixes_rows(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores - scores.nan_to_num(neginf=0).mean(0)


def mixes_texts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + input_ids[:, -1].max()


def uses_length(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores + input_ids.shape[1] / 1000


def long_texts(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """At no length that is tried but for the branch's own."""
    return scores + 1 if input_ids.shape[1] == 51 else scores


def twice_the_same(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """Of all texts of one token, wrong for one."""
    twice = torch.nn.functional.pad(input_ids, (1, 0), value=-1)[:, -2:] == 77
    return scores + twice.all(1, keepdim=True)


def writes_ids(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    input_ids[:, -1] = 0
    return scores


def needs_more(input_ids: torch.Tensor, scores: torch.Tensor, cur_len: int) -> torch.Tensor:
    return scores


AS_OPS = "Write it only with tensor operations"
NO_LENGTHS = "positions, counts and lengths are unknown"
REFUSED: dict[str, tuple[Any, str, str]] = {
    "min length": (hf.MinLengthLogitsProcessor(20, 1), "it depends on padding", r"give min_new_tokens=\.\.\. to"),
    "forced eos": (hf.ForcedEOSTokenLogitsProcessor(50, 1), "a sequence of 49 tokens", "give forced_eos_token_id"),
    "begin": (hf.SuppressTokensAtBeginLogitsProcessor([3], 41), "sequence of 41 tokens", "give begin_suppress_tokens"),
    "ngrams": (hf.NoRepeatNGramLogitsProcessor(2), "a sequence of 1 token changes", "give no_repeat_ngram_size"),
    "words": (hf.NoBadWordsLogitsProcessor([[5, 5, 7]]), "a sequence of 1 token changes", "give bad_words_ids"),
    "long word": (hf.NoBadWordsLogitsProcessor([[8, 8, 9, 10, 11, 12]]), "sequence of 4 tokens", "give bad_words_ids"),
    "length": (uses_length, "it depends on padding", NO_LENGTHS),
    "counts tokens": (CountsTokens(), "it depends on padding", NO_LENGTHS),
    "one length": (long_texts, "a sequence of 51 tokens changes when the sequence is padded to 64", NO_LENGTHS),
    "counts calls": (CountsCalls(), "two calls with the same tensors return different results", AS_OPS),
    "remembers": (Remembers(), "a call changes its 'seen'", AS_OPS),
    "count in a tensor": (CountsInATensor(), "a call changes its 'count'", AS_OPS),
    "draws": (draws, "two calls with the same tensors return different results", AS_OPS),
    "branches": (branches, "it reads the values of tensors in Python", AS_OPS),
    "loops": (loops, "it reads the values of tensors in Python", AS_OPS),
    "watermark": (hf.WatermarkLogitsProcessor(VOCAB, "cpu"), "it reads the values of tensors in Python", AS_OPS),
    "masks": (masks, "the size of a tensor depends on values", AS_OPS),
    "numpy": (numpys, "it cannot be traced: RuntimeError", AS_OPS),
    "loops over rows": (loops_over_rows, "it counts rows, or loops over them, in Python", AS_OPS),
    "rows": (mixes_rows, "its result for a row depends on the other rows", "must not depend on its neighbours"),
    "texts": (mixes_texts, "its result for a row depends on the other rows", "must not depend on its neighbours"),
    "shape": (lambda ids, scores: scores[:, :5], r"it returns float32 \[4, 5\]", r"float32 \[4, 128\] on cpu"),
    "dtype": (lambda ids, scores: scores.double(), r"it returns float64 \[4, 128\]", "It must return scores"),
    "nothing": (lambda ids, scores: None, "it returns NoneType", "It must return scores"),
    "ids": (writes_ids, "it writes into input_ids", "clone"),
    "arguments": (needs_more, "it raises TypeError: .*cur_len", r"called as processor\(input_ids, scores\)"),
    "a class": (hf.TemperatureLogitsWarper, "it raises TypeError", "It is called as"),
    "device": (lambda ids, scores: scores.to("meta"), "on meta", "on cpu"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_processor_that_cannot_be_traced_is_refused_by_name(name: str) -> None:
    processor, reason, advice = REFUSED[name]
    called = getattr(processor, "__name__", type(processor).__name__)
    with raises(UnsupportedProcessor, name=called, reason=re.compile(reason), advice=re.compile(advice)):
        wrapped([AfterLast(), processor])


def test_what_it_looks_for_is_tried() -> None:
    with raises(UnsupportedProcessor, reason=re.compile("its result for a sequence of 1 token changes")):
        check_processors(twice_the_same, vocab_size=5000, max_len=50, places=54, device=torch.device("cpu"))


def test_a_trace_leaves_nothing_in_a_processor() -> None:
    processor = Caches()
    with raises(UnsupportedProcessor, reason=re.compile("a call changes its 'zeros'")):
        wrapped(processor)
    assert type(processor.zeros) is torch.Tensor and processor.zeros.shape == (0,)
    remembers = Remembers()
    with raises(UnsupportedProcessor, reason=re.compile("a call changes its 'seen'")):
        wrapped(remembers)
    assert {type(length) for length in remembers.seen["lengths"]} == {int}


@pytest.mark.parametrize("given", [3, "repetition", [AfterLast(), None], {"penalty": 2}])
def test_what_is_no_processor(given: Any) -> None:
    with raises(
        InvalidOption, name="logits_processor", reason=re.compile("it must be a LogitsProcessor or a list of them")
    ):
        wrapped(given)


def test_the_check_draws_nothing_from_torchs_generator() -> None:
    state = torch.get_rng_state()
    check_processors(MAKE["several"](), vocab_size=VOCAB, max_len=50, places=54, device=torch.device("cpu"))
    assert torch.equal(torch.get_rng_state(), state)

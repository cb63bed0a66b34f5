"""Predicted outputs: what is drafted from a predicted text, and that it changes no text."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import InvalidOption
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.prediction import LONGEST_MATCH, reference
from support.errors import raises
from support.tiny import greedy, random_prompt

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
MAX_LEN, SLOTS = 96, 2
PROMPT = random_prompt(9)


def match(new: list[int], prediction: list[int], longest: int = 4) -> tuple[list[int], list[float]]:
    """The drafts of one row in slot 1, and their chances, after a prompt that looks like the prediction."""
    prompt = [1, 2, 3]
    tokens = torch.tensor([[*prompt, *new, 9]])
    predicted = torch.zeros(2, 20, dtype=torch.int64)
    predicted[1, : len(prediction)] = torch.tensor(prediction)
    length, count = torch.tensor([len(prompt) + len(new)]), torch.tensor([0, len(prediction)])
    state = torch.tensor([7, len(prompt)]), predicted, count
    drafts, lens, chances = OPS.match_prediction(torch.tensor([1]), tokens, length, *state, longest)
    assert not drafts[0, lens[0] :].any() and not chances[0, lens[0] :].any()
    return drafts[0, : lens[0]].tolist(), chances[0, : lens[0]].tolist()


def test_drafts_by_hand() -> None:
    assert match([], [5, 6, 7]) == ([5, 6, 7], pytest.approx([8 / 9, (8 / 9) ** 2, (8 / 9) ** 3]))
    assert match([5, 6], [5, 6, 7, 8])[0] == [7, 8]
    # The prompt is not a part of the match, and nothing follows the prediction's end.
    assert match([4], [2, 3, 4, 1, 2, 3]) == ([1, 2, 3], pytest.approx([0.5, 0.25, 0.125]))
    assert match([5, 6, 7], [5, 6, 7]) == ([], [])
    assert match([5], []) == ([], [])
    # After a wrong token, 7 8 follows the longer match; of two equal ones the nearer, then the later.
    assert match([5, 9, 7, 8], [7, 1, 5, 6, 7, 8, 2])[0] == [2]
    assert match([9, 6], [6, 1, 6, 2, 3])[0] == [2, 3]
    assert match([9, 9, 6], [6, 1, 0, 0, 6, 2])[0] == [2]


def searched(new: list[int], prediction: list[int], longest: int) -> tuple[list[int], int]:
    """The same by looking at every place; drafts, and the length of the match."""
    best = (0, 0, False, 0)
    for end in range(len(prediction)):
        sizes = range(min(LONGEST_MATCH, len(new), end) + 1)
        size = max(size for size in sizes if new[len(new) - size :] == prediction[end - size : end])
        if new == prediction[:end] and len(new) <= LONGEST_MATCH:
            size = LONGEST_MATCH
        best = max(best, (size, -abs(end - len(new)), end >= len(new), end))
    return (prediction[best[-1] :][:longest], best[0]) if best[0] else ([], 0)


sequences = st.lists(st.integers(0, 2), max_size=14)


@settings(deadline=None, max_examples=150)
@given(st.lists(st.tuples(st.integers(1, 4), sequences, sequences), min_size=1, max_size=3), st.integers(1, 6))
def test_both_forms_of_the_op_are_the_search(rows: list[tuple[int, list[int], list[int]]], longest: int) -> None:
    count = len(rows)
    slots = torch.arange(count).flip(0)
    tokens = torch.zeros(count, 20, dtype=torch.int64)
    length, prompt_length = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    predicted, predicted_length = torch.zeros(count, 15, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    for row, (prompt, new, prediction) in enumerate(rows):
        slot = int(slots[row])
        tokens[row, prompt : prompt + len(new)] = torch.tensor(new)
        length[row], prompt_length[slot] = prompt + len(new), prompt
        predicted[slot, : len(prediction)] = torch.tensor(prediction)
        predicted_length[slot] = len(prediction)
    arguments = slots, tokens, length, prompt_length, predicted, predicted_length, longest
    found, native = reference(*arguments), OPS.match_prediction(*arguments)
    for one, other in zip(found, native, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    for row, (_, new, prediction) in enumerate(rows):
        drafts, size = searched(new, prediction, longest)
        assert found[0][row, : found[1][row]].tolist() == drafts
        expected = [(size / (size + 1)) ** (place + 1) for place in range(len(drafts))]
        assert found[2][row, : len(drafts)].tolist() == pytest.approx(expected)


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    options = {"max_batch": SLOTS, "max_len": MAX_LEN, "backend": "eager", "policy": "fixed:3"}
    with speccompile.wrap(model, ["prediction", "ngram"], tiers=(0, 3), **options) as spec:
        yield spec


def test_the_text_is_the_same_with_any_prediction_and_a_right_one_is_accepted(
    spec: Speculator, model: LlamaForCausalLM
) -> None:
    expected = greedy(model, PROMPT, 40)
    lengths = {}
    half = [*expected[:15], 7, 7, 7, *expected[20:]]
    for name, prediction in {
        "none": None,
        "right": expected,
        "half": half,
        "wrong": [3] * MAX_LEN,
        "empty": [],
    }.items():
        request = spec.engine.submit(PROMPT, max_new_tokens=40, prediction=prediction)
        result = request.result()
        assert result.token_ids == expected
        assert all(source in (None, 0, 1) for source in request.drafted_by)
        drafts, right = request.stats.drafts_by.get(0, (0, 0))
        assert right == request.drafted_by.count(0) and drafts >= right
        if name in ("none", "empty"):
            assert not drafts
        lengths[name] = result.stats.acceptance_length
    # Some steps of reused prompts have no drafts.
    assert lengths["right"] > 3.5 and lengths["right"] > lengths["half"] > lengths["none"]


def test_a_prediction_is_of_one_request_alone(spec: Speculator, model: LlamaForCausalLM) -> None:
    """Neither of the one beside it, nor of the next one in its slot."""
    prompts = [random_prompt(9, seed) for seed in (1, 2, 3)]
    expected = [greedy(model, prompt, 20) for prompt in prompts]
    first, second, third = (
        spec.engine.submit(prompt, max_new_tokens=20, prediction=prediction)
        for prompt, prediction in zip(prompts, [expected[0], None, None], strict=True)
    )
    assert [request.result().token_ids for request in (first, second, third)] == expected
    assert first.stats.drafts_by[0][1] == first.drafted_by.count(0) > 10
    assert not second.stats.drafts_by.get(0, (0, 0))[0] and not third.stats.drafts_by.get(0, (0, 0))[0]
    assert not spec.arena["prediction_length"].any()


def test_drawn_text_is_the_same_with_a_prediction(spec: Speculator) -> None:
    options = {"max_new_tokens": 30, "do_sample": True, "temperature": 1.3, "seed": 5}
    plain = spec.engine.submit(PROMPT, **options).result()
    predicted = spec.engine.submit(PROMPT, prediction=torch.tensor([plain.token_ids]), **options).result()
    assert predicted.token_ids == plain.token_ids
    assert predicted.stats.acceptance_length > plain.stats.acceptance_length


@pytest.mark.parametrize(
    ("prediction", "reason"),
    [
        ([1] * (MAX_LEN + 1), "97 tokens; at most 96"),
        ([1, 128], "holds 128; token ids are 0 .. 127"),
        ([-1], "holds -1"),
        ([0.5], "whole token ids"),
        ("text", "token ids"),
        ([[1], [2]], "whole token ids"),
    ],
)
def test_what_is_refused(spec: Speculator, prediction: object, reason: str) -> None:
    with raises(InvalidOption, name="prediction", reason=re.compile(reason)):
        spec.engine.submit(PROMPT, prediction=prediction)  # type: ignore[arg-type]


def test_alone_it_drafts_for_requests_with_a_prediction(model: LlamaForCausalLM) -> None:
    expected = greedy(model, PROMPT, 30)
    with speccompile.wrap(model, "prediction", tiers=(0, 3), max_len=64, backend="eager", policy="fixed:3") as spec:
        assert spec.engine.submit(PROMPT, max_new_tokens=30).result().stats.draft_tokens == 0
        result = spec.engine.submit(PROMPT, max_new_tokens=30, prediction=expected).result()
        assert result.token_ids == expected and result.stats.acceptance_length > 3


def test_other_modes_refuse_predictions(model: LlamaForCausalLM) -> None:
    options = {"tiers": (0, 2), "max_len": 64, "backend": "eager"}
    refused = raises(InvalidOption, name="prediction", reason=re.compile("mode='prediction'"))
    with speccompile.wrap(model, "ngram", **options) as spec, refused:
        spec.engine.submit(PROMPT, prediction=[1])


def test_auto_composes_what_it_chooses(model: LlamaForCausalLM) -> None:
    with speccompile.wrap(model, predictions=True, tiers=(0, 2), max_len=64, backend="eager") as spec:
        assert spec.mode.drafter_names == ("prediction", "ngram")
        assert "continues the text that a request predicts" in spec.explain()

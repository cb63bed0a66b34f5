"""``forced`` by a recorded trace: each request replays it from its beginning, whatever runs beside it."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import wrap
from speccompile.acceptance import Forced
from speccompile.acceptance.replay import CAPACITY, count_steps, replayed
from speccompile.errors import InvalidOption
from speccompile.runtime.request import Request
from speccompile.speculator.speculator import Speculator
from support.errors import raises

K = 3
TRACE = [2, 0, 3, 1, 0]


class Tiers:
    """A policy that follows a list, again and again."""

    def __init__(self, draft_lens: Sequence[int]) -> None:
        self.draft_lens, self.chosen = draft_lens, 0

    def choose(self, live_rows: int) -> int:
        self.chosen += 1
        return self.draft_lens[(self.chosen - 1) % len(self.draft_lens)]


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    sizes: dict[str, Any] = {"tiers": (0, 1, K), "max_batch": 2, "max_len": 128, "backend": "eager"}
    with wrap(model, "ngram", acceptance=Forced(trace=TRACE), **sizes) as spec:
        yield spec


def emitted(spec: Speculator, requests: Sequence[Request]) -> list[list[int]]:
    """How many tokens each decode step emitted, of each request; they must not have begun."""
    steps: list[list[int]] = [[] for _ in requests]
    while not all(request.finished for request in requests):
        before = [request.stats.row_steps for request in requests]
        sums = [request.stats.emitted_tokens for request in requests]
        spec.engine.step()
        for request, count, total, its in zip(requests, before, sums, steps, strict=True):
            if request.stats.row_steps > count:
                its.append(request.stats.emitted_tokens - total)
    return steps


def submit(spec: Speculator, prompt: list[int], new: int, **options: Any) -> Request:
    return spec.engine.submit(prompt, max_new_tokens=new, eos_token_id=[], **options)


def by_trace(request: Request, tiers: Sequence[int] = (K,)) -> list[int]:
    """What its steps have to emit. Its first token came from its prompt, unless that was known."""
    known = request.stats.reused_tokens == request.stats.prompt_tokens - 1
    steps, place, left, ran = [], 0, request.params.max_new_tokens - (not known), 0
    while left:
        drafted = min(tiers[ran % len(tiers)], left - 1)
        ran += 1
        accepted = min(TRACE[place % len(TRACE)], drafted)
        place += drafted > 0
        steps.append(accepted + 1)
        left -= accepted + 1
    return steps


def test_the_trace_is_followed_exactly_and_starts_again(spec: Speculator) -> None:
    request = submit(spec, [1, 2, 3], 31)
    got = emitted(spec, [request])[0]
    assert got == by_trace(request) and got[:10] == [3, 1, 4, 2, 1] * 2
    assert [request.stats.accepted_at[place] for place in range(K)] == [sum(n > i + 1 for n in got) for i in range(K)]
    assert "a trace of 5 steps" in spec.explain()


@pytest.mark.parametrize("draws", [False, True])
def test_requests_side_by_side_and_slots_that_are_taken_again(spec: Speculator, draws: bool) -> None:
    """Five requests of different lengths over two slots, twice: each one its trace from the beginning, and its text."""
    options: dict[str, Any] = {"do_sample": True, "seed": 5} if draws else {}
    texts = []
    for _ in range(2):
        requests = [submit(spec, [7 + i, 8, 9], new, **options) for i, new in enumerate((9, 30, 14, 3, 22))]
        got = emitted(spec, requests)
        assert got == [by_trace(request) for request in requests]
        texts.append([request.new_tokens for request in requests])
    assert texts[0] == texts[1]


def test_a_prompt_that_is_not_read_starts_at_the_beginning_too(spec: Speculator) -> None:
    prompt = [40, 41, 42, 43, 44]
    first, again = submit(spec, prompt, 12), submit(spec, prompt, 12)
    got = emitted(spec, [first, again])
    assert [request.stats.reused_tokens for request in (first, again)] == [0, len(prompt) - 1]
    assert got == [by_trace(first), by_trace(again)] and got[0][:3] == got[1][:3] == [3, 1, 4]


def test_steps_without_drafts_take_no_entry_and_small_tiers_cut_them(spec: Speculator) -> None:
    policy = spec.engine.policy
    try:
        tiers = [random.Random(1).choice([0, 1, K]) for _ in range(64)]
        spec.engine.policy = Tiers(tiers)
        request = submit(spec, [60, 61, 62], 40)
        assert emitted(spec, [request])[0] == by_trace(request, tiers)
    finally:
        spec.engine.policy = policy


def test_text_and_kv_agree(spec: Speculator, model: LlamaForCausalLM) -> None:
    """The token after the drafts of each step is the target's choice after exactly that text."""
    prompt = [50, 51, 52]
    request = submit(spec, prompt, 30)
    ends = list(itertools.accumulate(emitted(spec, [request])[0], initial=1))
    assert ends[-1] == 30
    with torch.no_grad():
        choices = model(torch.tensor([prompt + request.new_tokens])).logits[0].argmax(-1).tolist()
    assert [request.new_tokens[end - 1] for end in ends] == [choices[len(prompt) + end - 2] for end in ends]


def test_the_ops_by_hand() -> None:
    trace, steps = torch.tensor([2, 0, 9, 5, 5]), torch.tensor([0, 4, 2, 7])
    slots, nothing = torch.tensor([2, 0, 1]), torch.zeros(3, 1)
    kept = replayed(nothing, torch.zeros(3, 4), nothing, nothing, slots, trace, steps, period=3)
    assert kept.sum(1).tolist() == [4, 2, 0]
    count_steps(steps, torch.tensor([3, 3, 0, 3]), torch.tensor([1, 0, 1, 4]), torch.tensor([0, 1, 2]))
    assert steps.tolist() == [1, 4, 2, 7], "proposed and emitted, and a row of this step"


@pytest.mark.parametrize(
    ("trace", "value", "reason"),
    [
        ([], [], "must be a list"),
        (3, 3, "must be a list"),
        ("12", "12", "must be a list"),
        ([1, -1], [1, -1], "-1 must be an int >= 0"),
        ([1, 2.0], [1, 2.0], "2.0 must be an int >= 0"),
        ([True], [True], "True must be an int >= 0"),
        ([1] * (CAPACITY + 1), [*[1] * 8, ...], "at most 4096 steps, got 4097"),
    ],
)
def test_traces_that_cannot_be_replayed_are_refused(trace: Any, value: Any, reason: str) -> None:
    with raises(InvalidOption, name="trace", value=value, reason=re.compile(reason)):
        Forced(trace=trace)


def test_a_trace_is_a_copy_and_has_no_coins() -> None:
    given = [1, 2]
    rule = Forced(trace=given)
    given.append(3)
    assert rule.trace == (1, 2) and len(Forced(trace=[0] * CAPACITY).state()) == 2
    with raises(InvalidOption, name="seed", value=1, reason=re.compile("a trace has no coins")):
        Forced(trace=[1], seed=1)

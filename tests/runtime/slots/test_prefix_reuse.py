"""A known beginning is not read again, wherever it is known from."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from speccompile import Speculator
from speccompile.runtime.request import Request
from support.known_texts import (
    FAMILIES,
    MAX_BATCH,
    VOCAB,
    assert_taken_over,
    decoded,
    forget,
    of_family,
    prompt,
    read_and_reused,
    wrap,
)
from support.tiny import admitted, greedy

# --- from a slot that is free ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_a_chat_reads_only_what_is_new(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    """Of the reply, the last token was emitted and never read: it has no KV yet."""
    model = of_family(family)
    spec = wrap(model, mode)
    assert spec.route == ("eager" if family in ("bloom", "falcon") else "attention")
    text, known, slots = prompt(30, seed=1), 0, []
    for turn, (new, question) in enumerate([(20, 12), (1, 1), (9, 40), (5, 3)]):
        request = decoded(spec, text, new)
        assert request.new_tokens == greedy(model, text, new), f"turn {turn}"
        assert_taken_over(request, known)
        slots.append(request.slot)
        text = text + request.new_tokens + prompt(question, seed=2 + turn)
        known = len(text) - question - 1
    assert len(set(slots)) == 1 and not copies, "the KV stayed where it was"


def test_a_text_that_goes_on_otherwise_is_copied_as_far_as_it_is_the_same(
    spec: Speculator, model: PreTrainedModel, copies: list[tuple[int, int, int]]
) -> None:
    first = decoded(spec, prompt(50, seed=1), 10)
    text = [*first.prompt[:31], (first.prompt[31] + 1) % VOCAB, 4, 5]
    request = decoded(spec, text, 10)
    assert read_and_reused(request) == (3, 31)
    assert copies == [(first.slot, request.slot, 31)] and first.slot != request.slot
    assert request.new_tokens == greedy(model, text, 10)
    # Both are known now.
    for former in (first, request):
        longer = [*former.prompt, *former.new_tokens, 7]
        again = decoded(spec, longer, 4)
        assert read_and_reused(again) == (2, len(longer) - 2)
        assert again.new_tokens == greedy(model, longer, 4)


def test_the_longest_beginning_wins(spec: Speculator) -> None:
    text = prompt(60, seed=1)
    for length in (20, 40, 30):
        decoded(spec, [*text[:length], 120 + length // 10], 1)
    assert read_and_reused(decoded(spec, text, 1)) == (20, 40)


def test_only_the_beginning_counts(spec: Speculator) -> None:
    text = prompt(40, seed=1)
    decoded(spec, text, 5)
    for other in ([9, *text], text[1:], [10, *text[1:]]):
        assert read_and_reused(decoded(spec, other, 5)) == (len(other), 0)


def test_the_end_of_a_text_that_an_eos_or_a_stop_ended(model: PreTrainedModel) -> None:
    """The whole model drafts, so a step computes KV after the token that became the last one; that is not taken."""
    spec = wrap(model, "early_exit", exit_layer=2)
    text = prompt(20, seed=1)
    new = greedy(model, text, 12)
    assert new[6] not in new[:6]
    ends: list[tuple[dict[str, Any], int]] = [
        # Cut off in the graph, which counts the newest token as one without KV.
        ({"eos_token_id": new[6]}, 26),
        # Cut off by the host, in the middle of what the step emitted.
        ({"stopping_criteria": lambda ids, scores: ids[0, -1] == new[6]}, 27),
    ]
    for arguments, known in ends:
        forget(spec)
        request = decoded(spec, text, 12, **arguments)
        assert request.new_tokens == new[:7]
        other = [*text, *new[:7], (new[7] + 1) % VOCAB, 5]
        again = decoded(spec, other, 12)
        assert read_and_reused(again) == (len(other) - known, known)
        assert again.new_tokens == greedy(model, other, 12)


# --- from a slot that runs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_a_running_text_lends_its_beginning(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    model = of_family(family)
    spec = wrap(model, mode)
    running = admitted(spec.engine, prompt(30, seed=1), max_new_tokens=60)
    while len(running.new_tokens) < 12:
        spec.engine.step()
    begun = [*running.prompt, *running.new_tokens[:6]]
    # Another continuation of its text, and its text as it stands, whose last token has no KV yet.
    branch = spec.engine.submit([*begun, (running.new_tokens[6] + 1) % 100, 7, 8], max_new_tokens=20)
    whole = spec.engine.submit([*running.prompt, *running.new_tokens], max_new_tokens=20)
    spec.engine.step()
    assert not running.finished
    assert read_and_reused(branch) == (3, len(begun))
    assert read_and_reused(whole) == (0, len(whole.prompt) - 1)
    assert [copied[0] for copied in copies] == [running.slot] * 2
    assert len({running.slot, branch.slot, whole.slot}) == 3
    spec.engine.run()
    for request in (running, branch, whole):
        assert request.new_tokens == greedy(model, request.prompt, request.params.max_new_tokens)


def test_a_prompt_that_is_still_being_read_lends_what_was_read(spec: Speculator, model: PreTrainedModel) -> None:
    """The one in front is read first; the one after gets all of it at once."""
    text = prompt(200, seed=1)
    first = spec.engine.submit(text, max_new_tokens=5)
    second = spec.engine.submit([*text[:150], 3, 4], max_new_tokens=5)
    spec.engine.run()
    assert read_and_reused(first) == (200, 0)
    assert read_and_reused(second) == (2, 150)
    for request in (first, second):
        assert request.new_tokens == greedy(model, request.prompt, 5)


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_identical_prompts_are_read_once(family: str, mode: str) -> None:
    model = of_family(family)
    spec = wrap(model, mode)
    text = prompt(45, seed=1)
    requests = [spec.engine.submit(text, max_new_tokens=20) for _ in range(MAX_BATCH + 2)]
    spec.engine.run()
    assert [read_and_reused(request) for request in requests] == [(45, 0)] + [(0, 44)] * (MAX_BATCH + 1)
    expected = greedy(model, text, 20)
    assert all(request.new_tokens == expected for request in requests)
    assert (spec.stats.prefill_tokens, spec.stats.reused_tokens) == (45, 44 * (MAX_BATCH + 1))
    # The first step of a follower reads its last token, and its tokens are a step's.
    assert requests[0].stats.emitted_tokens == 19
    assert all(request.stats.emitted_tokens == 20 for request in requests[1:])


def test_a_prompt_of_one_token_is_read_each_time(spec: Speculator, model: PreTrainedModel) -> None:
    for _ in range(2):
        request = decoded(spec, [5], 6)
        assert read_and_reused(request) == (1, 0)
        assert request.new_tokens == greedy(model, [5], 6)


def test_continuations_of_one_prompt_by_generate(spec: Speculator, model: PreTrainedModel) -> None:
    ids = torch.tensor([prompt(30, seed=1)])
    output = spec.generate(ids, num_return_sequences=3, max_new_tokens=9)
    assert output.tolist() == [[*prompt(30, seed=1), *greedy(model, prompt(30, seed=1), 9)]] * 3
    assert [(stats.prefill_tokens, stats.reused_tokens) for stats in spec.stats.requests] == [(30, 0), (0, 29), (0, 29)]


# --- conversations at random -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "mode"), FAMILIES)
def test_conversations_at_random(family: str, mode: str, copies: list[tuple[int, int, int]]) -> None:
    """Prompts that begin like any earlier text, whether it has ended, runs or was cancelled: all texts are exact."""
    model, rng = of_family(family), random.Random(7)
    spec = wrap(model, mode, prefill_budget=24)
    engine = spec.engine
    requests: list[Request] = []
    cancelled = 0
    for _ in range(30):
        base: list[int] = []
        if requests and rng.random() < 0.8:
            former = rng.choice(requests[-4:])
            base = [*former.prompt, *former.new_tokens]
            base = base[: rng.randint(0, len(base))]
        text = (base + rng.choices(range(VOCAB if family == "llama" else 100), k=rng.randint(1, 20)))[-150:]
        requests.append(engine.submit(text, max_new_tokens=rng.randint(1, 12)))
        for _ in range(rng.randint(0, 6)):
            engine.step()
            if rng.random() < 0.05 and engine.running:
                cancelled += rng.choice(engine.running).cancel()
    engine.run()
    for request in requests:
        expected = greedy(model, request.prompt, request.params.max_new_tokens)
        assert request.error is None
        if request.finish_reason == "cancelled":
            assert request.new_tokens == expected[: len(request.new_tokens)]
        else:
            assert request.new_tokens == expected
            assert_taken_over(request, request.stats.reused_tokens)
    assert cancelled > 0
    in_place = [request for request in requests if request.stats.reused_tokens]
    assert len(copies) > 3 and len(in_place) > len(copies), "both ways were taken"

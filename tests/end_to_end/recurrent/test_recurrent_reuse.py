"""Recurrent state that is known: at the end of a sequence, and at checkpoints in it."""

from __future__ import annotations

import random

import torch

from support.recurrent_targets import INTERVAL, NEW, Wrapped, cancelled_halfway, finished, prompts


def test_a_prompt_that_goes_on_from_a_known_end_reuses_the_state(reusing: Wrapped) -> None:
    first = finished(reusing, prompts(1, seed=8)[0][:20])
    for more in ([20], [21, 22, 23]):
        text = first.prompt + first.new_tokens
        slot, first = first.slot, finished(reusing, [*text, *more])
        assert first.stats.reused_tokens == len(text) - 1 and first.slot == slot
    assert "prefix reuse on" in reusing.spec.explain()


def test_a_prompt_that_leaves_a_known_text_after_what_is_absorbed_goes_on_from_a_copy(reusing: Wrapped) -> None:
    reusing.spec.set_tier(0)
    first = finished(reusing, prompts(1, seed=15)[0][:20])
    absorbed, state = reusing.state_of(first)
    shared = (first.prompt + first.new_tokens)[:absorbed]
    second = finished(reusing, [*shared, 101])
    assert second.stats.reused_tokens == absorbed == len(first.prompt) + 4 and second.slot != first.slot
    assert all(map(torch.equal, state, reusing.state_of(first)[1]))


def test_a_prompt_that_leaves_a_known_text_before_its_first_checkpoint_is_read_anew(reusing: Wrapped) -> None:
    first = finished(reusing, random.Random(13).choices(range(5, 100), k=20), NEW)
    before = reusing.spec.stats.reread_tokens
    stats = finished(reusing, [*first.prompt[: INTERVAL - 1], 101]).stats
    assert (stats.reused_tokens, stats.reread_tokens) == (0, INTERVAL - 1)
    assert reusing.spec.stats.reread_tokens == before + INTERVAL - 1


def test_a_prompt_that_leaves_a_known_text_goes_on_from_the_last_checkpoint_before_that_place(reusing: Wrapped) -> None:
    reusing.spec.set_tier(0)
    first = finished(reusing, random.Random(16).choices(range(5, 100), k=20), NEW)
    text = first.prompt + first.new_tokens
    # A prompt's chunks end at multiples of 4 tokens, and the steps after it at each one.
    for left in (INTERVAL, 2 * INTERVAL - 1, 2 * INTERVAL, 30):
        request = finished(reusing, [*text[:left], 101, 7])
        absorbed = left // INTERVAL * INTERVAL
        assert (request.stats.reused_tokens, request.stats.reread_tokens) == (absorbed, left - absorbed)


def test_a_criterion_among_accepted_drafts_leaves_no_absorbed_token_that_the_text_lacks(reusing: Wrapped) -> None:
    """A step has absorbed drafts after the end; the next prompts continue from the text as it was returned."""
    first = prompts(1, seed=31)[0][:9]
    whole = reusing.expected(first)
    for count in (2, 3, 5, 7):
        stop = len(first) + count
        request = reusing.spec.engine.submit(
            first, max_new_tokens=NEW, stopping_criteria=lambda ids, scores, stop=stop: ids.shape[1] >= stop
        )
        assert request.result().token_ids == whole[:count]
        # Another token than the next one, or the next ones and then another.
        for more in ([7, 8], [*whole[count : count + 3], 7]):
            finished(reusing, first + whole[:count] + more)


def test_state_after_a_checkpoint_has_the_bits_of_a_prompt_that_was_read_from_its_beginning(reusing: Wrapped) -> None:
    reusing.spec.set_tier(0)
    text = finished(reusing, random.Random(17).choices(range(5, 100), k=20), NEW)
    prompt = [*text.prompt, *text.new_tokens[:9], 101, 7]
    expected = reusing.fresh_state(prompt)
    request = reusing.spec.engine.submit(prompt, max_new_tokens=NEW)
    while not request.new_tokens:
        reusing.spec.engine.step()
    assert request.stats.reused_tokens == 2 * INTERVAL
    absorbed, state = reusing.state_of(request)
    assert absorbed == len(prompt) and all(map(torch.equal, state, expected))
    request.cancel()


def test_the_state_of_a_prompt_that_was_cancelled_halfway_is_used_again(reusing: Wrapped) -> None:
    prompt = random.Random(14).choices(range(5, 100), k=44)
    read = cancelled_halfway(reusing, prompt)
    assert finished(reusing, prompt).stats.reused_tokens == read


def test_explain_names_recurrences_and_that_prompts_are_read_in_chunks_of_their_own(target: Wrapped) -> None:
    explained = target.spec.explain()
    assert "along with a step" not in explained
    assert f"prefix reuse {'on' if target.spec.engine.prefix_reuse else 'off'}" in explained
    assert "recurrences" in explained and "choose_recurrence" in explained

"""Prompts: who gets a slot, what is read before which step, and whose failure is whose."""

from __future__ import annotations

import pytest
import torch

from speccompile.graph.state import recorded_state
from speccompile.runtime.score_records import ExtraOutputs
from support.engine_parts import VOCAB, WIDTHS, Parts
from support.engines import Breaks


@pytest.fixture
def mixing() -> Parts:
    """Prompts are read along with the steps of a row that runs."""
    parts = Parts()
    parts.table.prepare("greedy", watched=True)
    parts.running([10], new=12)
    return parts


def test_a_prompt_is_read_in_chunks_of_which_the_last_one_chooses_a_token() -> None:
    parts = Parts()
    request = parts.submit([1, 2, 3, 4, 5])
    assert parts.prompts.read() and request.new_tokens == [] and parts.batch.readers == [request]
    assert parts.prompts.read() and request.new_tokens == [6] and parts.batch.rows == [request]
    assert parts.runs == ["chunk T=4 inner", "chunk T=2 greedy"]
    assert not parts.batch.readers and request.stats.prefill_tokens == parts.stats.prefill_tokens == 5
    assert not parts.prompts.read(), "nothing is left to read"


def test_a_request_of_one_token_ends_with_its_prompt() -> None:
    parts = Parts()
    request = parts.submit([1, 2], new=1)
    assert parts.prompts.read()
    assert (request.new_tokens, request.finish_reason) == ([3], "max_new_tokens")
    assert not parts.batch.rows and parts.slots.free == 2


def test_prompts_wait_for_a_free_slot() -> None:
    parts = Parts()
    first, second, third = (parts.submit([token]) for token in (1, 2, 3))
    while parts.prompts.read():
        pass
    assert parts.batch.rows == [first, second] and third.slot == -1 and len(parts.waiting) == 1


def test_a_request_that_was_cancelled_while_it_waited_gets_no_slot() -> None:
    parts = Parts()
    cancelled, next_one = parts.submit(), parts.submit()
    cancelled.end("cancelled")
    parts.prompts.read()
    assert cancelled.slot == -1 and parts.batch.rows == [next_one]


def test_a_streamer_that_raises_at_admission_ends_its_own_request() -> None:
    parts, error = Parts(), OSError("the pipe is closed")
    failing, next_one = parts.submit(streamer=Breaks(1, error)), parts.submit()
    parts.prompts.read()
    assert failing.error is error and failing.closed
    assert parts.batch.rows == [next_one] and parts.slots.free == 1


def test_a_chunk_that_raises_ends_its_own_request() -> None:
    parts, error = Parts(), MemoryError()

    def fails_once() -> None:
        parts.before = lambda: None
        raise error

    parts.before = fails_once
    failing, next_one = parts.submit(), parts.submit()
    while parts.prompts.read():
        pass
    assert failing.error is error and failing.new_tokens == []
    assert parts.batch.rows == [next_one] and parts.slots.owned == [next_one]


def test_between_two_steps_as_much_is_read_as_the_budget_allows() -> None:
    parts = Parts(budget=WIDTHS[-1])
    parts.running([30], new=9)
    request = parts.submit(list(range(1, 10)))
    for cached in (4, 8, 9):
        assert not parts.prompts.read(), "the row that runs is not kept waiting"
        assert request.cached == cached
    assert parts.runs == ["chunk T=4 inner", "chunk T=4 inner", "chunk T=2 greedy"]


def test_prompts_of_patient_requests_go_before_the_next_step() -> None:
    parts = Parts(budget=WIDTHS[-1])
    parts.running([30], patient=True)
    parts.submit([1, 2, 3], patient=True)
    assert parts.prompts.read() and not parts.prompts.read()


def test_what_a_step_reads_along_is_not_read_before_it(mixing: Parts) -> None:
    request = mixing.submit([1, 2, 3, 4])
    assert not mixing.prompts.read() and mixing.runs == []
    assert mixing.batch.readers == [request] and mixing.prompts.along is request
    mixing.prompts.point_at(request)
    assert int(mixing.arena["prefill_slot"]) == request.slot and int(mixing.arena["prefill_start"]) == 0


def test_the_last_token_of_a_prompt_that_is_read_along_is_left_to_a_step_of_its_own(mixing: Parts) -> None:
    request = mixing.submit(list(range(1, 8)))
    mixing.prompts.read()
    mixing.prompts.count_along(request, 4)
    assert request.cached == 4 and request not in mixing.batch.rows
    mixing.prompts.count_along(request, 4)
    assert request.cached == 6 and request in mixing.batch.rows and not mixing.batch.readers
    assert request.stats.prefill_tokens == 6 and request.new_tokens == []


def test_a_prompt_of_one_token_that_would_be_read_along_is_a_row_at_once(mixing: Parts) -> None:
    request = mixing.submit([1])
    assert not mixing.prompts.read()
    assert request in mixing.batch.rows and mixing.runs == [] and request.new_tokens == []


def test_a_prompt_whose_log_probabilities_are_wanted_has_chunks_that_record_them() -> None:
    parts = Parts(None, *recorded_state(VOCAB, WIDTHS[-1], scores=False))
    parts.table.prepare("greedy", watched=True)
    parts.running([10], new=12)
    parts.arena["chunk_logprobs"].copy_(torch.tensor([-1.0, -2.0, -3.0, -4.0]))
    request = parts.submit([1, 2, 3, 4], outputs=ExtraOutputs(prompt_logprobs=True))
    while request not in parts.batch.rows:
        parts.prompts.read()
        assert parts.runs, "it is not read along"
    assert {name.split()[-1] for name in parts.runs} == {"prompt_scored"}
    # How it is cut depends on the time that chunks take: in two at least, or in one.
    assert request.records.prompt_logprobs in ([None, -1.0, -2.0, -1.0], [None, -1.0, -2.0, -3.0])


def test_a_prompt_that_is_known_up_to_its_last_token_is_not_read() -> None:
    parts = Parts(reuse=True)
    before = parts.running([1, 2, 3], new=3)
    while not before.finished:
        parts.scheduler.run_step()
    parts.runs.clear()
    request = parts.submit([1, 2, 3, 4, 9])
    assert not parts.prompts.read()
    assert parts.runs == [] and parts.batch.rows == [request]
    assert (request.cached, parts.stats.reused_tokens) == (4, 4)


def test_a_prompt_that_was_cancelled_is_not_read_on() -> None:
    parts = Parts()
    request = parts.submit([1, 2, 3, 4, 5])
    parts.prompts.read()
    request.end("cancelled")
    assert not parts.prompts.read() and parts.runs == ["chunk T=4 inner"]

"""Prompts: who gets a slot, what is read before which step, and whose failure is whose."""

from __future__ import annotations

import pytest
import torch

from speccompile.graph.state import recorded_state
from speccompile.runtime.score_records import ExtraOutputs
from support.engine_parts import VOCAB, WIDTHS, Parts


@pytest.fixture
def mixing() -> Parts:
    """Prompts are read along with the steps of a row that runs."""
    parts = Parts()
    parts.table.prepare("greedy", watched=True)
    parts.running([10], new=12)
    return parts


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


def test_a_client_that_repeats_a_known_prompt_does_not_get_all_slots() -> None:
    parts = Parts(reuse=True)
    repeated = [parts.submit([1, 2, 3], client=("10.0.0.7",)) for _ in range(8)]
    other = parts.submit([7, 8, 9], client=("10.0.0.8",))
    while not other.finished:
        parts.step()
    assert sum(request.finished for request in repeated) <= 3

"""Tokens on their way to a request, and why its row has ended."""

from __future__ import annotations

import pytest
import torch
from transformers import StoppingCriteriaList

from speccompile.errors import UndecidedLogits
from speccompile.runtime.delivery import Delivery, Judgement
from speccompile.runtime.listener import Listener
from support.engine_parts import MAX_LEN, Parts, admitted


@pytest.mark.parametrize(
    ("new", "eos", "reason"),
    [([7], (7,), "eos"), ([3, 4, 5, 6], (7,), "max_new_tokens"), ([3], (7,), "error")],
)
def test_delivery_finds_out_why_a_row_has_ended(new: list[int], eos: tuple[int, ...], reason: str) -> None:
    parts = Parts()
    request = admitted(parts.arena, eos=eos)
    Delivery(parts.retirement, parts.stats, MAX_LEN).deliver(request, new, False, {})
    assert (request.new_tokens, request.finish_reason) == (new, reason)
    assert isinstance(request.error, UndecidedLogits) == (reason == "error")


def test_accepted_draft_tokens_are_marked_up_to_a_stop() -> None:
    parts = Parts()
    request = admitted(parts.arena)
    Delivery(parts.retirement, parts.stats, MAX_LEN).deliver(request, [3, 4, 5], True, {}, Judgement(2, 2, source=1))
    assert request.drafted_by == [1, 1, None]
    request.end("cancelled")
    Delivery(parts.retirement, parts.stats, MAX_LEN).deliver(request, [6], True, {}, Judgement(1, 1))
    assert len(request.drafted_by) == len(request.new_tokens) == 3


def test_accepted_drafts_after_a_stop_are_not_counted() -> None:
    """The sequence has the tokens up to the stop, and so have the counts of the request and of all requests."""
    parts = Parts()
    request = admitted(parts.arena, new=8)
    stop = StoppingCriteriaList([lambda ids, scores: ids[0, -1] == 4])
    request.listener = Listener(torch.tensor([request.prompt]), 8, None, stop)
    Delivery(parts.retirement, parts.stats, MAX_LEN).deliver(request, [3, 4, 5, 6], True, {}, Judgement(3, 3, source=1))
    assert (request.new_tokens, request.finish_reason) == ([3, 4], "stop")
    for counters in (parts.stats, request.stats):
        assert (counters.emitted_tokens, counters.accepted_tokens, counters.draft_tokens) == (2, 2, 3)
        assert (counters.accepted_at, counters.proposed_at) == ([1, 1, 0], [1, 1, 1])
    assert request.stats.drafts_by == {1: (3, 2)}

"""Tokens on their way to a request, and why its row has ended."""

from __future__ import annotations

import pytest

from speccompile.errors import UndecidedLogits
from speccompile.runtime.delivery import Delivery
from support.engine_parts import MAX_LEN, Parts, admitted


@pytest.mark.parametrize(
    ("new", "eos", "reason"),
    [([7], (7,), "eos"), ([3, 4, 5, 6], (7,), "max_new_tokens"), ([3], (7,), "error")],
)
def test_delivery_finds_out_why_a_row_has_ended(new: list[int], eos: tuple[int, ...], reason: str) -> None:
    parts = Parts()
    request = admitted(parts.arena, eos=eos)
    Delivery(parts.departures, parts.stats, MAX_LEN).deliver(request, new, False, {})
    assert (request.new_tokens, request.finish_reason) == (new, reason)
    assert isinstance(request.error, UndecidedLogits) == (reason == "error")


def test_accepted_draft_tokens_are_marked_up_to_a_stop() -> None:
    parts = Parts()
    request = admitted(parts.arena)
    Delivery(parts.departures, parts.stats, MAX_LEN).deliver(request, [3, 4, 5], True, {}, accepted=2, source=1)
    assert request.drafted_by == [1, 1, None]
    request.end("cancelled")
    Delivery(parts.departures, parts.stats, MAX_LEN).deliver(request, [6], True, {}, accepted=1)
    assert len(request.drafted_by) == len(request.new_tokens) == 3

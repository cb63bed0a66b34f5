"""What the host writes for a row before its step, and whose failure it is when that goes wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from speccompile.errors import DraftFailed, InvalidInput
from speccompile.modes.ready_mode import proposal_state
from speccompile.runtime.request import Request
from speccompile.sampling.allowed import AllowedTokens
from speccompile.sampling.host import HostProcessors
from speccompile.sampling.pipeline import sampling_state
from speccompile.sampling.request import Sampling
from support.engine_parts import VOCAB, Parts
from support.errors import assert_error


def parts_with(**options: Any) -> Parts:
    return Parts(None, *sampling_state([AllowedTokens(), HostProcessors()]), *proposal_state(), **options)


def admitted(parts: Parts, sampling: Sampling | None = None) -> Request:
    """A row, whose prompt ``[1, 2]`` was not read."""
    request = parts.submit(sampling=sampling)
    parts.waiting.remove(request)
    parts.slots.take(request)
    parts.batch.readers.append(request)
    parts.batch.join(request)
    return request


def asking(function: Callable[[int, torch.Tensor], Any], row: int = 0) -> Sampling:
    return Sampling({"prefix_allowed_tokens_fn": function}, row=row)


def test_the_function_sees_its_row_and_the_whole_sequence() -> None:
    parts, seen = parts_with(), []
    request = admitted(parts, asking(lambda row, text: seen.append((row, text.tolist())) or [7], row=1))
    request.add([5])
    parts.host_calls.ask(request)
    assert seen == [(1, [1, 2, 5])]


def test_the_tokens_that_it_allows_are_those_of_its_slot() -> None:
    parts = parts_with()
    other, request = admitted(parts), admitted(parts, asking(lambda row, text: [7, 9]))
    parts.host_calls.ask(request)
    assert parts.arena["allowed_tokens"][request.slot].nonzero().flatten().tolist() == [7, 9]
    assert parts.arena["allowed_tokens"][other.slot].all()


@pytest.mark.parametrize("sampling", [None, Sampling({})])
def test_a_request_that_asks_nothing_gets_nothing(sampling: Sampling | None) -> None:
    parts = parts_with()
    request = admitted(parts, sampling)
    parts.host_calls.ask(request)
    assert parts.arena["allowed_tokens"].all() and not parts.arena["host_call"].any()


def test_a_step_finds_what_it_calls_by_its_number() -> None:
    parts = parts_with()
    sampling = Sampling({"logits_processor": (lambda ids, scores: scores,)})
    sampling = sampling.of_request(torch.tensor([[1, 2]]), 2, VOCAB, torch.device("cpu"))
    request = admitted(parts, sampling)
    parts.host_calls.ask(request)
    assert sampling.host_call is not None
    assert int(parts.arena["host_call"][request.slot]) == sampling.host_call.number


def test_an_answer_that_is_not_valid_ends_its_own_request() -> None:
    parts = parts_with()
    other, request = admitted(parts), admitted(parts, asking(lambda row, text: [VOCAB]))
    parts.host_calls.ask(request)
    assert_error(request.error, InvalidInput, name="prefix_allowed_tokens_fn")
    assert parts.batch.rows == [other] and parts.slots.free == 1


def test_an_interrupt_in_the_function_is_kept_for_the_end_of_the_step() -> None:
    parts, interrupt = parts_with(), KeyboardInterrupt()

    def interrupted(row: int, text: torch.Tensor) -> list[int]:
        raise interrupt

    request = admitted(parts, asking(interrupted))
    parts.host_calls.ask(request)
    assert request.finish_reason == "error" and parts.retirement.take_interrupt() is interrupt


def test_drafts_of_the_host_are_those_of_their_rows() -> None:
    parts = parts_with(host_draft=lambda tokens, draft_len: [tokens[-1]] * len(tokens))
    rows = [admitted(parts), admitted(parts)]
    rows[1].add([8])
    parts.host_calls.draft(rows)
    assert [parts.arena["draft_tokens"][row.slot].tolist() for row in rows] == [[2, 2, 0], [8, 8, 8]]
    assert [int(parts.arena["draft_lens"][row.slot]) for row in rows] == [2, 2]


def test_a_drafter_that_fails_ends_the_request_whose_row_it_was() -> None:
    parts = parts_with(host_draft=lambda tokens, draft_len: [1] if len(tokens) == 2 else [VOCAB])
    good, bad = admitted(parts), admitted(parts)
    bad.add([8])
    parts.host_calls.draft(parts.batch.rows)
    assert_error(bad.error, DraftFailed)
    assert parts.batch.rows == [good] and int(parts.arena["draft_lens"][good.slot]) == 1


def test_without_a_drafter_on_the_host_proposals_stay_as_they_are() -> None:
    parts = parts_with()
    request = admitted(parts)
    parts.arena["draft_lens"][request.slot] = 3
    parts.host_calls.draft([request])
    assert int(parts.arena["draft_lens"][request.slot]) == 3

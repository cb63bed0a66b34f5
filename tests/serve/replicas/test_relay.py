"""A request is sent to another replica while nothing of its answer was passed on, and only then."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest

from speccompile.serve.replicas import relay as relay_module
from speccompile.serve.replicas.call import Head, ReplicaCall
from speccompile.serve.replicas.relay import ATTEMPTS, Parts, relay

CALL = ReplicaCall("POST", "/v1/completions", b"", [], b"{}")
EVENTS = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
JSON = Head(200, [(b"content-type", b"application/json"), (b"content-length", b"4")])


class Died(Exception):
    """How a replica's death is reported."""


class Replicas:
    """Each item is what one attempt receives; an exception is raised."""

    def __init__(self, *attempts: Sequence[Any]) -> None:
        self.attempts, self.asked, self.closed = list(attempts), 0, 0

    async def ask(self, call: ReplicaCall) -> Parts:
        assert call is CALL
        self.asked += 1
        try:
            for part in self.attempts[self.asked - 1]:
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            self.closed += 1


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay_module, "PAUSE_SECONDS", 0.0)


def answered(replicas: Replicas, *, leave_after: int | None = None) -> tuple[int, list[bytes]]:
    """Status and parts of the body; the client leaves after so many."""

    async def run() -> tuple[int, list[bytes]]:
        response = await relay(CALL, replicas.ask, (Died,))
        sent: list[Any] = []
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)
            if leave_after is not None and len(sent) > leave_after:
                left.set()
                await asyncio.sleep(3600)

        await response(CALL.scope(), receive, send)
        return sent[0]["status"], [message["body"] for message in sent[1:] if message["body"]]

    return asyncio.run(run())


def test_an_answer_is_passed_on() -> None:
    replicas = Replicas([EVENTS, b"a", b"b", b"c"])
    assert answered(replicas) == (200, [b"a", b"b", b"c"])
    assert replicas.closed == 1


def test_the_id_of_a_request_is_left_to_the_proxy() -> None:
    head = Head(200, [*JSON.headers, (b"x-request-id", b"a")])
    response = asyncio.run(relay(CALL, Replicas([head, b"null"]).ask, (Died,)))
    assert response.raw_headers == JSON.headers


@pytest.mark.parametrize("before", [[], [EVENTS], [JSON]], ids=["nothing", "a stream's head", "a head"])
def test_another_replica_answers(before: list[Any]) -> None:
    replicas = Replicas([*before, Died()], [*before, Died()], [EVENTS, b"a"])
    assert answered(replicas) == (200, [b"a"])
    assert replicas.asked == replicas.closed == 3


def test_all_replicas_die() -> None:
    replicas = Replicas(*[[Died()]] * ATTEMPTS)
    status, (body,) = answered(replicas)
    assert status == 503 and json.loads(body)["error"]["code"] == "no_replica"
    assert replicas.closed == ATTEMPTS


def test_a_stream_that_is_cut_ends_with_an_error() -> None:
    replicas = Replicas([EVENTS, b"a", Died()])
    status, (first, last) = answered(replicas)
    assert (status, first) == (200, b"a")
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "replica_died"
    assert replicas.asked == replicas.closed == 1


def test_another_answer_that_is_cut_is_not_completed() -> None:
    replicas = Replicas([JSON, b"{", Died()])
    with pytest.raises(Died):
        answered(replicas)
    assert replicas.asked == replicas.closed == 1


def test_other_errors_are_not_tried_again() -> None:
    replicas = Replicas([LookupError()], [EVENTS, b"a"])
    with pytest.raises(LookupError):
        answered(replicas)
    assert replicas.asked == replicas.closed == 1


def test_a_client_that_leaves_ends_the_call() -> None:
    replicas = Replicas([EVENTS, b"a", b"b", b"c"])
    answered(replicas, leave_after=2)
    assert replicas.closed == 1


def test_an_answer_without_a_body() -> None:
    assert answered(Replicas([Head(204, [])])) == (204, [])

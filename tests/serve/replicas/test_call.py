"""A call travels to an application without a socket, and its answer comes back in parts."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from speccompile.serve.api_error import ApiError
from speccompile.serve.app import create_app
from speccompile.serve.replicas.call import Head, ReplicaCall, answer, read_call
from support.serving import Client

JSON = [(b"content-type", b"application/json")]


def chat(**fields: Any) -> ReplicaCall:
    body = {"messages": [{"role": "user", "content": "abc"}], "max_tokens": 12, "temperature": 0, **fields}
    return ReplicaCall("POST", "/v1/chat/completions", b"", JSON, json.dumps(body).encode())


async def parts_of(app: Any, call: ReplicaCall) -> list[Any]:
    return [part async for part in answer(app, call)]


def test_it_answers_as_over_a_socket(client: Client) -> None:
    expected = client.post("/v1/chat/completions", json.loads(chat().body)).json()
    head, *body = asyncio.run(parts_of(create_app(client.service), chat()))
    assert isinstance(head, Head) and head.status == 200
    assert json.loads(b"".join(body))["choices"] == expected["choices"]


def test_a_stream_comes_in_parts(client: Client) -> None:
    head, *events = asyncio.run(parts_of(create_app(client.service), chat(stream=True)))
    assert dict(head.headers)[b"content-type"].startswith(b"text/event-stream")
    assert len(events) > 3 and events[-1] == b"data: [DONE]\n\n"


def test_the_application_sees_its_client_leave() -> None:
    seen: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        seen.append((await receive())["type"])

    async def leave() -> None:
        async with contextlib.aclosing(answer(app, chat())) as parts:
            await anext(parts)

    asyncio.run(leave())
    assert seen == ["http.request", "http.disconnect"]


def test_an_error_of_the_application_is_raised() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise LookupError("no such thing")

    with pytest.raises(LookupError):
        asyncio.run(parts_of(app, chat()))


def test_a_body_has_a_limit() -> None:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"a" * 60, "more_body": True}

    request = Request(chat().scope(), receive)
    with pytest.raises(ApiError) as refused:
        asyncio.run(read_call(request, 1000, 60))
    assert (refused.value.status, refused.value.code) == (413, "body_too_large")


def test_the_application_sees_the_address_of_the_client() -> None:
    async def scope_of() -> Scope:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"", "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/", "query_string": b"", "headers": []}
        return (await read_call(Request({**scope, "client": ("10.0.0.7", 5000)}, receive), 10, 60)).scope()

    assert asyncio.run(scope_of())["client"] == ("10.0.0.7", 5000)

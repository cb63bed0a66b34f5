"""An HTTP request as a value that is sent to a replica, and the parts of its answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Scope

from speccompile.serve.body import read_bytes

Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True)
class ReplicaCall:
    """A request with its body."""

    method: str
    path: str
    query: bytes
    headers: Headers
    body: bytes
    client: tuple[str, int] | None = None

    def scope(self) -> Scope:
        """ASGI scope of the request."""
        return {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.path.encode(),
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": self.client,
        }


@dataclass(frozen=True)
class Head:
    """First part of an answer. All other parts are bytes of the body."""

    status: int
    headers: Headers


async def read_call(request: Request, most: int, seconds: float) -> ReplicaCall:
    """Read a request with its body, of at most ``most`` bytes, which must arrive within ``seconds``.

    Raises:
        ApiError: the body is larger or slower.
    """
    body = await read_bytes(request, most, seconds)
    query, client = request.url.query.encode(), request.scope.get("client")
    return ReplicaCall(request.method, request.url.path, query, request.headers.raw, body, client)


async def answer(app: ASGIApp, call: ReplicaCall) -> AsyncGenerator[Head | bytes, None]:
    """Yield the parts of the answer of ``app``. If the generator is closed, ``app`` is notified that its client left.

    Raises:
        Exception: an exception of ``app``.
    """
    sent: asyncio.Queue[Message | None] = asyncio.Queue()
    left = asyncio.Event()
    unread = [{"type": "http.request", "body": call.body, "more_body": False}]

    async def receive() -> Message:
        if unread:
            return unread.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    running = asyncio.ensure_future(app(call.scope(), receive, sent.put))
    running.add_done_callback(lambda _: sent.put_nowait(None))
    try:
        while (message := await sent.get()) is not None:
            if message["type"] == "http.response.start":
                yield Head(message["status"], list(message["headers"]))
            elif body := message.get("body"):
                yield body
        await running
    finally:
        left.set()
        await asyncio.wait([running])

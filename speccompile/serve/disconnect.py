"""Cancels the work for a client that leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Answer = TypeVar("Answer")


#: Status in the log for a response without a reader, as in nginx.
CLIENT_LEFT = 499


class ClientLeft(Exception):
    """The client has left."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
    """Return the result of ``work``, which is cancelled if the client leaves. The body must have been read.

    Raises:
        ClientLeft: the client has left.
    """
    running = asyncio.create_task(work)
    watching = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise ClientLeft
    finally:
        watching.cancel()
        running.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_while_connected(request: Request, work: Coroutine[Any, Any, Response]) -> Response:
    """Return the response of ``work``. The client may have left, and then does not receive it.

    Raises:
        Exception: an exception of ``work``.
    """
    try:
        return await while_connected(request.receive, work)
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)


class PartedResponse(Response):
    """Body in parts from an async generator, which is closed when the client leaves. (Starlette's streaming response
    leaves that to the garbage collector.)"""

    def __init__(self, parts: AsyncGenerator[bytes | str, None], status: int = 200) -> None:
        super().__init__(status_code=status)
        del self.headers["content-length"]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientLeft, OSError):
            # A server raises OSError if nothing can be sent.
            return

    async def _send(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for part in self._parts:
                await send({"type": "http.response.body", "body": self.render(part), "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._parts.aclose()


class EventStream(PartedResponse):
    """Server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[str, None]) -> None:
        super().__init__(events)
        self.headers.update({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

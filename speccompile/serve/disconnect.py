"""Work for a client ends when the client leaves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, TypeVar

from fastapi import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Answer = TypeVar("Answer")


#: The status of a response that has no reader, for the log: nginx's.
CLIENT_LEFT = 499


class ClientLeft(Exception):
    """There is no client to answer any more."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of ``work``, which is cancelled when the client leaves. The body has been read.

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
    """The response of ``work``; a client that has left does not receive it.

    Raises:
        Exception: of ``work``.
    """
    try:
        return await while_connected(request.receive, work)
    except ClientLeft:
        return Response(status_code=CLIENT_LEFT)


class PartedResponse(Response):
    """A body that comes in parts from an async generator, which is closed when the client leaves. (Starlette's own
    streaming response closes it when the garbage collector finds it.)"""

    def __init__(self, parts: AsyncGenerator[bytes | str, None], status: int = 200) -> None:
        super().__init__(status_code=status)
        del self.headers["content-length"]
        self._parts = parts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await while_connected(receive, self._send(send))
        except (ClientLeft, OSError):
            # An OSError is how a server reports that nothing can be sent.
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

"""End of a server: the answers to requests that have not ended in time."""

from __future__ import annotations

import asyncio
import contextlib

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speccompile.serve.api_error import closed_error
from speccompile.serve.service import Service
from speccompile.serve.streams import event

#: Seconds in which a client must receive the last event, before its connection is closed.
_LAST_SECONDS = 0.5


class EndWithServer:
    """ASGI middleware: a request that is cancelled because ``service`` ends receives status 503, or an error event if
    its stream has begun."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun: list[Message] = []
        done = False

        async def noted(message: Message) -> None:
            nonlocal done
            if message["type"] == "http.response.start":
                begun.append(message)
            done = message["type"] == "http.response.body" and not message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, noted)
        except asyncio.CancelledError:
            if scope["type"] != "http" or not self._service.ends:
                raise
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LAST_SECONDS):
                    if not begun:
                        await closed_error().response()(scope, receive, send)
                    elif not done and _is_stream(begun[0]):
                        last = event(closed_error().body()).encode()
                        await send({"type": "http.response.body", "body": last, "more_body": False})


def _is_stream(start: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in start["headers"])

"""Closes connections instead of reading bodies that an answer did not wait for."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class CloseUnread:
    """ASGI middleware: an answer that begins before the end of the request's body closes the connection. Otherwise a
    server would read the rest of the body to find the next request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_body(scope):
            await self._app(scope, receive, send)
            return
        unread = True

        async def received() -> Message:
            nonlocal unread
            message = await receive()
            unread = unread and bool(message.get("more_body"))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and unread:
                message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
            await send(message)

        await self._app(scope, received, sent)


def _has_body(scope: Scope) -> bool:
    # HTTP/2 has no such header.
    if not scope["http_version"].startswith("1"):
        return False
    return any(
        name == b"transfer-encoding" or (name == b"content-length" and value != b"0")
        for name, value in scope["headers"]
    )

"""One log line a request, and the API key."""

from __future__ import annotations

import hmac
import logging
import time
from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from speccompile.errors import shown
from speccompile.errors.base import clipped
from speccompile.runtime.request import Request
from speccompile.serve.api_error import ApiError
from speccompile.serve.counts import Counts
from speccompile.serve.disconnect import CLIENT_LEFT

log = logging.getLogger("speccompile.serve")

#: Paths that need no key: load balancers and Prometheus have none, as in vLLM, and the page asks for it.
_OPEN_PATHS = ("/", "/health", "/metrics")
_OPEN_FOLDER = "/page/"
_POLLED = ("/", "/health", "/live", "/metrics")


@dataclass
class Note:
    """What a request made the engine do, for its line."""

    requests: Sequence[Request] = ()
    user: str | None = None
    error: ApiError | None = None
    started: float = field(default_factory=time.perf_counter)

    def line(self, method: str, path: str, status: int) -> str:
        """The log's line of a request."""
        # Quoted: a path may have line breaks.
        parts = [
            f"{method} {clipped(quote(clipped(path), safe='/:'))} {status}",
            f"{time.perf_counter() - self.started:.3f} s",
        ]
        if self.error is not None:
            # Messages may quote what a user wrote.
            parts.append(f"{self.error.code or self.error.kind} {self.error.param or ''}".rstrip())
        if self.user is not None:
            parts.append(f"user {shown(self.user)}")
        if self.requests:
            new = sum(len(request.new_tokens) for request in self.requests)
            steps = sum(request.stats.row_steps for request in self.requests)
            emitted = sum(request.stats.emitted_tokens for request in self.requests)
            reasons = sorted({request.finish_reason or "running" for request in self.requests})
            parts.append(f"{len(self.requests[0].prompt)} prompt tokens, {new} new, {'/'.join(reasons)}")
            parts.append(f"acceptance length {emitted / steps:.2f}" if steps else "no step")
        return ", ".join(parts)


#: Of the request that the current task answers.
current: ContextVar[Note] = ContextVar("note")


class RequestLog:
    """ASGI middleware around the whole application.

    Args:
        api_key: what requests have to bring; None if nothing.
    """

    def __init__(self, app: ASGIApp, counts: Counts, api_key: str | None) -> None:
        self._app = app
        self._counts = counts
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note, status = Note(), CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        token = current.set(note)
        try:
            if self._may_pass(scope):
                await self._app(scope, receive, noted)
            else:
                error = ApiError("the API key is missing or wrong", status=401, code="invalid_api_key")
                await error.response()(scope, receive, noted)
        finally:
            current.reset(token)
            # The work for a response ends with it, also if its stream never began.
            for request in note.requests:
                request.cancel()
            self._counts.count(status, note.requests)
            # Polled by the page, dashboards and load balancers.
            quiet = status < 400 and (scope["path"] in _POLLED or scope["path"].startswith(_OPEN_FOLDER))
            log.log(logging.DEBUG if quiet else logging.INFO, "%s", note.line(scope["method"], scope["path"], status))

    def _may_pass(self, scope: Scope) -> bool:
        if self._key is None or scope["path"] in _OPEN_PATHS or scope["path"].startswith(_OPEN_FOLDER):
            return True
        given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        # In a time that does not depend on where they differ.
        return hmac.compare_digest(key, self._key) and scheme.lower() == b"bearer"

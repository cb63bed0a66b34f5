"""One log line per request, and the id of a request."""

from __future__ import annotations

import logging
import re
import time
import uuid
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

#: Paths that the page, dashboards and load balancers poll.
_POLLED = ("/", "/health", "/live", "/metrics", "/ping")
_PAGE_FILES = "/page/"
#: Ids that clients may set. Other ids are replaced.
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


@dataclass
class Note:
    """Data for the log line of a request. ``id`` is also in the answer."""

    id: str
    requests: Sequence[Request] = ()
    user: str | None = None
    error: ApiError | None = None
    client: tuple[str, ...] | None = None
    started: float = field(default_factory=time.perf_counter)

    def line(self, method: str, path: str, status: int) -> str:
        """Log line of a request."""
        # Quoted, since a path may have line breaks.
        parts = [
            f"{method} {clipped(quote(clipped(path), safe='/:'))} {status}",
            f"{time.perf_counter() - self.started:.3f} s",
        ]
        if self.error is not None:
            # Only code and field: messages may quote what a user wrote.
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
        parts.append(f"id {self.id}")
        return ", ".join(parts)


#: Note of the request that the current task answers.
current: ContextVar[Note] = ContextVar("note")


class RequestLog:
    """ASGI middleware around the whole application."""

    def __init__(self, app: ASGIApp, counts: Counts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        note, status = Note(_request_id(scope)), CLIENT_LEFT

        async def noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (b"x-request-id", note.id.encode())]}
            await send(message)

        token = current.set(note)
        try:
            await self._app(scope, receive, noted)
        finally:
            current.reset(token)
            # The requests end with the response, even if its stream never began.
            for request in note.requests:
                request.cancel()
            self._counts.count(status, note.requests)
            quiet = status < 400 and (scope["path"] in _POLLED or scope["path"].startswith(_PAGE_FILES))
            log.log(logging.DEBUG if quiet else logging.INFO, "%s", note.line(scope["method"], scope["path"], status))


def _request_id(scope: Scope) -> str:
    """Id from the client's header ``x-request-id``, or else a new one."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"")
    return given.decode() if _REQUEST_ID.fullmatch(given) else new_request_id()


def new_request_id() -> str:
    """Create a new request id."""
    return f"req_{uuid.uuid4().hex}"

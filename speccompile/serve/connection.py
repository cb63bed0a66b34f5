"""HTTP over a connection: uvicorn's, with limits on the head of a request, which uvicorn does not have."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from speccompile.serve.api_error import ApiError
from speccompile.serve.request_log import new_request_id

#: Bytes of a head, of what follows the last chunk of a body, and of what is between two chunks.
MOST_HEAD_BYTES = 65_536
#: Parts of a body that may be of any size. More of them must have this many bytes on average: a chunk of one byte costs
#: as much time as one of thousands.
MOST_SMALL_PARTS, _PART_BYTES = 4096, 256
_TOO_LARGE = f"the head of the request is larger than {MOST_HEAD_BYTES} bytes"

log = logging.getLogger("speccompile.serve")


class LimitedConnection(HttpToolsProtocol):
    """Closes a connection whose request has a head that is too large or is not complete in time, or a body in very many
    small chunks.

    Args:
        head_seconds: in which a head must arrive, from the beginning of the connection or from its first byte.
        arguments, keywords: uvicorn's.
    """

    def __init__(self, *arguments: Any, head_seconds: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None
        # Bytes of which the parser has made nothing yet.
        self._pending = 0
        # Of the body: parts, and bytes.
        self._parts, self._bytes = 0, 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._pending += len(data)
        super().data_received(data)
        if self.transport.is_closing():
            return
        waits = self.cycle is None or self.cycle.response_complete
        if self._pending > MOST_HEAD_BYTES:
            if waits:
                self._refuse(ApiError(_TOO_LARGE, status=431, code="head_too_large"))
            self.transport.close()
        elif waits and self._timer is None:
            self._start_timer()

    def send_400_response(self, msg: str) -> None:
        """The answer to what is not a request of HTTP, in place of uvicorn's; ``msg`` is its description."""
        self._refuse(ApiError(msg, code="invalid_http"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and log a request that the application does not receive."""
        request_id, response = new_request_id(), error.response({"connection": "close"})
        headers = [*response.raw_headers, (b"x-request-id", request_id.encode())]
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode()]
        lines += [name + b": " + value for name, value in headers]
        self.transport.write(b"\r\n".join([*lines, b"", bytes(response.body)]))
        log.info("%d, %s, id %s", error.status, error.code, request_id)

    def on_headers_complete(self) -> None:
        self._pending = self._parts = self._bytes = 0
        self._stop_timer()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pending = 0
        self._parts += 1
        self._bytes += len(body)
        if self._parts > MOST_SMALL_PARTS and self._parts * _PART_BYTES > self._bytes:
            # The answer has status 400, and the connection is closed.
            raise httptools.HttpParserError("the chunks of the body are too small")
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._pending = 0
        super().on_message_complete()

    def _start_timer(self) -> None:
        self._timer = self.loop.call_later(self._head_seconds, self.transport.close)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

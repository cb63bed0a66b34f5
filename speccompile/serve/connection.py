"""HTTP protocol of a connection: uvicorn's, with limits on the head of a request, which uvicorn lacks."""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from speccompile.serve.api_error import ApiError
from speccompile.serve.request_log import new_request_id

#: Largest number of bytes of a head, of the trailer of a body, and between two chunks of a body.
MOST_HEAD_BYTES = 65_536
#: Number of parts of a body that may be of any size. More parts must have this many bytes on average: a chunk of one
#: byte needs as much time as a chunk of thousands.
MOST_SMALL_PARTS, _PART_BYTES = 4096, 256
_TOO_LARGE = f"the head of the request is larger than {MOST_HEAD_BYTES} bytes"

log = logging.getLogger("speccompile.serve")


class LimitedConnection(HttpToolsProtocol):
    """Connection that is closed if the head of a request is too large or too slow, or if a body has very many small
    chunks.

    Args:
        head_seconds: time within which a head must arrive, from the start of the connection or from its first byte.
        arguments, keywords: arguments of uvicorn's class.
    """

    def __init__(self, *arguments: Any, head_seconds: float, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._head_seconds = head_seconds
        self._timer: asyncio.TimerHandle | None = None
        # Received bytes that the parser has not reported yet.
        self._pending = 0
        # Number of parts of the body, and their bytes.
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
        """Answer data that is not a valid HTTP request. Replaces uvicorn's method; ``msg`` describes the error."""
        self._refuse(ApiError(msg, code="invalid_http"))
        self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Answer and log a request without passing it to the application."""
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
            # The parser error leads to status 400, and the connection is closed.
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

"""Passes on the answer of a replica. If the replica dies before that, another replica is used."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable

from starlette.responses import Response
from starlette.types import Send

from speccompile.errors import error_line
from speccompile.serve.api_error import ApiError
from speccompile.serve.disconnect import PartedResponse
from speccompile.serve.replicas.call import Head, Headers, ReplicaCall

log = logging.getLogger("speccompile.serve")

Parts = AsyncGenerator[Head | bytes, None]
#: Number of replicas to try, and seconds between attempts, in which a dead one is removed from the list.
ATTEMPTS, PAUSE_SECONDS = 4, 0.5


async def relay(call: ReplicaCall, ask: Callable[[ReplicaCall], Parts], lost: tuple[type[Exception], ...]) -> Response:
    """Return the answer of a replica. A stream is passed on from its first part, any other answer as a whole.

    Args:
        ask: sends a call to a replica. The same call may be sent several times.
        lost: exceptions by which ``ask`` reports that the replica has died.
    """
    for attempt in range(ATTEMPTS):
        parts = ask(call)
        try:
            head = await anext(parts)
            assert isinstance(head, Head)
            # A stream's head arrives before its first token. Until that token another replica may still answer.
            first = await (anext(parts, b"") if head.is_stream else _whole_body(head, parts, lost))
        except lost as error:
            log.warning(
                "a replica died before it answered (%s): attempt %d of %d", error_line(error), attempt + 1, ATTEMPTS
            )
            await parts.aclose()
            await asyncio.sleep(PAUSE_SECONDS)
            continue
        except BaseException:
            await parts.aclose()
            raise
        assert isinstance(first, bytes)
        if head.is_stream:
            return _Relayed(head, first, parts, lost)
        response = Response(first, head.status)
        response.raw_headers = _headers(head)
        return response
    return ApiError("no replica could answer; try again later", status=503, code="no_replica").response()


def _headers(head: Head) -> Headers:
    """Headers of an answer without the one that Ray's proxy adds to all answers."""
    return [item for item in head.headers if item[0] != b"x-request-id"]


async def _whole_body(head: Head, parts: Parts, lost: tuple[type[Exception], ...]) -> bytes:
    """Read a body to its end. A replica that dies after the last announced byte has answered."""
    body = b""
    try:
        async for part in parts:
            assert isinstance(part, bytes)
            body += part
    except lost:
        if len(body) != head.length:
            raise
    return body


class _Relayed(PartedResponse):
    """Stream with a known first part. The other parts follow until the client leaves."""

    def __init__(self, head: Head, first: bytes, rest: Parts, lost: tuple[type[Exception], ...]) -> None:
        super().__init__(_passed_on(first, rest, lost), head.status)
        self.raw_headers = _headers(head)
        self._rest = rest

    async def _send(self, send: Send) -> None:
        try:
            await super()._send(send)
        finally:
            # Close the stream even if nothing of the answer was sent.
            await self._rest.aclose()


async def _passed_on(first: bytes, rest: Parts, lost: tuple[type[Exception], ...]) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for part in rest:
            assert isinstance(part, bytes)
            yield part
    except lost as error:
        log.warning("a replica died in the middle of a stream: %s", error_line(error))
        message = "the replica died in the middle of the stream; the text so far is not complete"
        yield f"data: {json.dumps(ApiError(message, status=500, code='replica_died').body())}\n\n".encode()

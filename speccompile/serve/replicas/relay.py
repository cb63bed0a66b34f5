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
from speccompile.serve.replicas.call import Head, ReplicaCall

log = logging.getLogger("speccompile.serve")

Parts = AsyncGenerator[Head | bytes, None]
#: Number of replicas to try, and seconds between attempts, in which a dead one is removed from the list.
ATTEMPTS, PAUSE_SECONDS = 4, 0.5


async def relay(call: ReplicaCall, ask: Callable[[ReplicaCall], Parts], lost: tuple[type[Exception], ...]) -> Response:
    """Return the answer of a replica.

    Args:
        ask: sends a call to a replica. The same call may be sent several times.
        lost: exceptions by which ``ask`` reports that the replica has died.
    """
    for attempt in range(ATTEMPTS):
        parts = ask(call)
        try:
            head = await anext(parts)
            # A stream's head arrives before its first token. Until that token another replica may still answer.
            first = await anext(parts, b"")
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
        assert isinstance(head, Head) and isinstance(first, bytes)
        return _Relayed(head, first, parts, lost)
    return ApiError("no replica could answer; try again later", status=503, code="no_replica").response()


class _Relayed(PartedResponse):
    """Answer with a known first part. The other parts follow until the client leaves."""

    def __init__(self, head: Head, first: bytes, rest: Parts, lost: tuple[type[Exception], ...]) -> None:
        super().__init__(_passed_on(head, first, rest, lost), head.status)
        # Ray's proxy adds this header to all answers.
        self.raw_headers = [item for item in head.headers if item[0] != b"x-request-id"]
        self._rest = rest

    async def _send(self, send: Send) -> None:
        try:
            await super()._send(send)
        finally:
            # Close the stream even if nothing of the answer was sent.
            await self._rest.aclose()


async def _passed_on(
    head: Head, first: bytes, rest: Parts, lost: tuple[type[Exception], ...]
) -> AsyncGenerator[bytes, None]:
    yield first
    try:
        async for part in rest:
            assert isinstance(part, bytes)
            yield part
    except lost as error:
        log.warning("a replica died in the middle of an answer: %s", error_line(error))
        if not dict(head.headers).get(b"content-type", b"").startswith(b"text/event-stream"):
            # The connection closes before the announced length.
            raise
        message = "the replica died in the middle of the stream; the text so far is not complete"
        yield f"data: {json.dumps(ApiError(message, status=500, code='replica_died').body())}\n\n".encode()

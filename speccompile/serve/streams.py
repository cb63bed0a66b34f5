"""Merged streams of several continuations, and server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from pydantic import BaseModel

from speccompile.serve.api_error import ApiError
from speccompile.serve.continuation import Continuation, Piece

log = logging.getLogger("speccompile.serve")

DONE = "data: [DONE]\n\n"
#: JSON allows these characters without an escape, but many clients treat them as the end of a line.
_LINE_ENDS = {ord(character): f"\\u{ord(character):04x}" for character in "\x85\u2028\u2029"}


async def merged(continuations: Sequence[Continuation]) -> AsyncGenerator[tuple[Continuation, Piece], None]:
    """Yield the pieces of all ``continuations`` as they arrive. If one fails, or the reader leaves, all are cancelled.

    Raises:
        ApiError: a request failed.
    """
    arrived: asyncio.Queue[tuple[Continuation, Piece] | BaseException | None] = asyncio.Queue()

    async def read(continuation: Continuation) -> None:
        try:
            async for piece in continuation.pieces():
                arrived.put_nowait((continuation, piece))
            arrived.put_nowait(None)
        except Exception as error:
            arrived.put_nowait(error)

    tasks = [asyncio.create_task(read(continuation)) for continuation in continuations]
    try:
        running = len(tasks)
        while running:
            item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                running -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for continuation in continuations:
            continuation.request.cancel()


def as_json(model: BaseModel) -> dict[str, Any]:
    """Dump the fields that were set. Warnings are off: the API has null in fields whose types do not allow it."""
    return model.model_dump(mode="json", exclude_unset=True, warnings=False)


def event(data: BaseModel | dict[str, Any]) -> str:
    """Format one server-sent event."""
    shown = data if isinstance(data, dict) else as_json(data)
    return f"data: {json.dumps(shown, ensure_ascii=False).translate(_LINE_ENDS)}\n\n"


async def with_errors(events: AsyncGenerator[str, None]) -> AsyncGenerator[str, None]:
    """Yield ``events``. An error after the first one becomes an event, since the status has been sent."""
    async with contextlib.aclosing(events):
        try:
            async for item in events:
                yield item
        except ApiError as error:
            yield event(error.body())
        except Exception:
            log.exception("a stream failed")
            yield event(ApiError("the server failed; its log has the reason", status=500).body())

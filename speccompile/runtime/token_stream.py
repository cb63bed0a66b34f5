"""The tokens of one request while they arrive, for ``for`` and ``async for``."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from speccompile.runtime.request import Request


class TokenStream:
    """The new tokens of one request, for any number of readers, each from the first token on.

    A reader receives the tokens that were emitted before the request ended, and then
    :class:`~speccompile.errors.RequestFailed` if it failed.

    A stream that is abandoned cancels its request. It is abandoned if its loop is left by ``break`` or an exception, if
    its task is cancelled, or if it is garbage-collected without having been read. The request continues while another
    stream is read, or another thread waits for the result. Use ``request.new_tokens`` to read only the first tokens.
    """

    def __init__(self, request: Request) -> None:
        self._request = request
        self._was_read = False

    def __iter__(self) -> Generator[int, None, None]:
        request, seen, reader = self._request, 0, object()
        self._was_read = True
        request.readers.add(reader)
        try:
            while True:
                # Read before the tokens: all tokens of an ended request exist by then.
                finished = request.finished
                for token in request.new_tokens[seen:]:
                    seen += 1
                    yield token
                if finished:
                    request.raise_error()
                    return
                request.driver.wait(request, seen)
        except GeneratorExit:
            request.readers.discard(reader)
            request.abandon()
            raise
        finally:
            request.readers.discard(reader)

    def __del__(self) -> None:
        if not self._was_read:
            self._request.abandon()

    async def __aiter__(self) -> AsyncGenerator[int, None]:
        request, seen, reader = self._request, 0, object()
        self._was_read = True
        request.readers.add(reader)
        try:
            while True:
                finished = request.finished
                for token in request.new_tokens[seen:]:
                    seen += 1
                    yield token
                if finished:
                    request.raise_error()
                    return
                await request.driver.wait_async(request, seen)
        finally:
            request.readers.discard(reader)
            if not request.readers:
                request.cancel()

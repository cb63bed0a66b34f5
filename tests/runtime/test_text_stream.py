"""Streams of text: characters come whole, and a stream that is left cancels its request."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Callable

import pytest
from transformers.convert_slow_tokenizer import bytes_to_unicode

from speccompile.errors import InvalidOption
from speccompile.runtime.request import NoDriver, Request
from support.engine_parts import request_of, small_arena
from support.engines import run_async
from support.errors import raises
from support.guide_tokenizers import byte_level

TEXT = "a\U0001f642é \u4e16a"


class Feeds(NoDriver):
    """Gives a request one token for each wait, and then ends it."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = iter(ids)

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        token = next(self._ids, None)
        if token is None:
            request.end("max_new_tokens")
        else:
            request.add([token])

    async def wait_async(self, request: Request, seen: int) -> None:
        await asyncio.sleep(0)
        self.wait(request, seen)


def running(tokens: int | None = None) -> Request:
    """A request whose new text is ``TEXT``, or the text of its first ``tokens``: bytes."""
    tokenizer, unicode_of = byte_level(), bytes_to_unicode()
    ids = tokenizer.convert_tokens_to_ids([unicode_of[byte] for byte in TEXT.encode()])
    request = request_of(small_arena(), [5], new=99, tokenizer=tokenizer)
    request.driver = Feeds(ids[:tokens])
    return request


async def read(request: Request) -> list[str]:
    return [piece async for piece in request.stream(text=True)]


@pytest.mark.parametrize(
    "of", [lambda request: list(request.stream(text=True)), lambda request: run_async(read(request))]
)
def test_characters_of_several_tokens_come_whole(of: Callable[[Request], list[str]]) -> None:
    request = running()
    assert of(request) == list(TEXT) and request.result().text == TEXT
    # What an end leaves of a character is in the text too.
    cut = running(3)
    assert of(cut) == ["a", "\ufffd"] and cut.result().text == "a\ufffd"


def test_a_stream_of_text_that_is_left_cancels_its_request() -> None:
    left = running()
    for _ in left.stream(text=True):
        break
    assert left.finish_reason == "cancelled"

    async def leave(request: Request) -> None:
        async for _ in request.stream(text=True):
            break
        # The loop closes what was left at its next turn.
        for _ in range(3):
            await asyncio.sleep(0)

    other, unread = running(), running()
    run_async(leave(other))
    unread.stream(text=True)
    gc.collect()
    assert other.finish_reason == unread.finish_reason == "cancelled"


def test_a_stream_of_text_needs_a_tokenizer() -> None:
    request = request_of(small_arena())
    with raises(InvalidOption, where="stream", name="text", reason=re.compile(r"pass submit\(tokenizer=tokenizer\)")):
        request.stream(text=True)

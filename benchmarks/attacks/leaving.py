"""Clients that leave, and clients that do not read."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from benchmarks.attacks.attack import CHAT, CLOSED, COMPLETIONS, LEFT, Outcome, Target, attack, head

#: An answer that takes a while.
_LONG: dict[str, Any] = {"prompt": "the old mill", "max_tokens": 1000, "ignore_eos": True}


async def _leave(target: Target, path: str, body: dict[str, Any], *, pieces: int, seconds: float) -> Outcome:
    """Leave after so many events of a stream, or after a time."""
    data = json.dumps(body).encode()
    async with target.connection() as (reader, writer):
        writer.write(head(path, len(data)) + data)
        try:
            async with asyncio.timeout(seconds):
                for _ in range(pieces):
                    await reader.readuntil(b"\n\n")
                await asyncio.sleep(0 if pieces else seconds)
        except (TimeoutError, asyncio.IncompleteReadError):
            pass
    return LEFT


@attack(LEFT)
async def leaves_a_stream(target: Target) -> Outcome:
    return await _leave(target, COMPLETIONS, {**_LONG, "stream": True}, pieces=target.rng.randint(1, 20), seconds=30)


@attack(LEFT)
async def leaves_a_whole_answer(target: Target) -> Outcome:
    return await _leave(target, COMPLETIONS, _LONG, pieces=0, seconds=3 * target.rng.random())


@attack(LEFT)
async def leaves_many_choices(target: Target) -> Outcome:
    return await _leave(target, COMPLETIONS, {**_LONG, "n": 8, "stream": True}, pieces=5, seconds=10)


@attack(LEFT)
async def leaves_a_long_prompt(target: Target) -> Outcome:
    words = " ".join(target.rng.choices(["river", "mill", "stone", "tree"], k=target.max_len * 3 // 4))
    body = {**_LONG, "prompt": words, "stream": True}
    return await _leave(target, COMPLETIONS, body, pieces=0, seconds=3 * target.rng.random())


@attack(LEFT)
async def leaves_within_the_body(target: Target) -> Outcome:
    async with target.connection() as (_, writer):
        writer.write(head(CHAT, 10_000) + b'{"messages": [')
        await asyncio.sleep(target.rng.random())
    return LEFT


@attack(LEFT)
async def leaves_large_bodies(target: Target) -> Outcome:
    """The server is still reading when the client has left."""
    data = json.dumps({"prompt": ["a" * 4000] * 1000}).encode()
    for _ in range(8):
        async with target.connection() as (_, writer):
            writer.write(head(COMPLETIONS, len(data)) + data)
            await asyncio.sleep(0.05)
    return LEFT


@attack(LEFT)
async def leaves_prompts_of_empty_texts(target: Target) -> Outcome:
    data = b'{"prompt": [""' + b',""' * 400_000 + b"]}"
    async with target.connection() as (_, writer):
        writer.write(head(COMPLETIONS, len(data)) + data)
        await asyncio.sleep(0.2)
    return LEFT


@attack(LEFT, CLOSED)
async def reads_nothing(target: Target) -> Outcome:
    body = {**_LONG, "n": 4, "stream": True, "logprobs": 5, "return_token_sources": True}
    data = json.dumps(body).encode()
    async with target.connection() as (_, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(head(COMPLETIONS, len(data)) + data)
        await asyncio.sleep(15)
    return LEFT

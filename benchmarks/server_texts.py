"""Does the server change a text, or break a call? Conversations beside clients that leave, and calls of random tools.

``python -m benchmarks.server_texts --conversations 64 --calls 200``; a tiny random model, and exit code 1 if a text
or a call is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections import Counter
from typing import Annotated, Any

import httpx2
import typer
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from benchmarks.server_in_process import choice_of, client_of, greedy_answer, listening, pieces, random_chat_model
from benchmarks.tool_schemas import is_valid, random_schema
from speccompile import wrap
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service

MAX_LEN = 1024
WORDS = ("the", "end", "name", "call", "12", "of", "é", "river", "{", "and")
#: Of turns, those that a client first asks for and leaves.
LEAVES = 0.3
MOST_TURNS = 3


async def converse(
    client: httpx2.AsyncClient, rng: random.Random, new_tokens: int, counts: Counter[str]
) -> list[dict[str, Any]]:
    """One conversation of one to three turns, by stream or whole, left and asked again at random."""
    messages: list[dict[str, Any]] = []
    await asyncio.sleep(rng.random())
    for _ in range(rng.randint(1, MOST_TURNS)):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))})
        body = {"messages": messages, "max_tokens": new_tokens, "temperature": 0}
        if rng.random() < LEAVES:
            counts["left"] += 1
            await leave(client, body, rng)
        if rng.random() < 0.5:
            text = "".join([piece async for piece in pieces(client, body)])
        else:
            text = (await choice_of(client, body))["message"]["content"]
        messages.append({"role": "assistant", "content": text})
    return messages


async def leave(client: httpx2.AsyncClient, body: dict[str, Any], rng: random.Random) -> None:
    """Ask, and drop the connection: after some pieces of a stream, or after a moment."""
    if rng.random() < 0.5:
        most = rng.randint(1, 20)
        async with contextlib.aclosing(pieces(client, body)) as stream:
            async for _ in stream:
                most -= 1
                if not most:
                    return
    else:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(choice_of(client, body), rng.random() / 4)


def wrong_turns(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]], new_tokens: int
) -> list[str]:
    """Turns whose text is not that of ``model.generate``."""
    found = []
    for place in range(1, len(messages), 2):
        expected = greedy_answer(model, tokenizer, messages[:place], new_tokens)
        if messages[place]["content"] != expected:
            found.append(f"turn {place // 2}: {messages[place]['content']!r} is not {expected!r}")
    return found


async def call_tools(client: httpx2.AsyncClient, seed: int, most_drafts: int) -> list[dict[str, Any]]:
    """The choices of one request with random tools, with drafts and without, and the schemas."""
    rng = random.Random(seed)
    schemas = {f"tool_{number}": random_schema(rng) for number in range(rng.randint(1, 2))}
    tools = [{"type": "function", "function": {"name": name, "parameters": schemas[name]}} for name in schemas]
    body = {
        "messages": [{"role": "user", "content": " ".join(rng.choices(WORDS, k=6))}],
        **{"tools": tools, "tool_choice": "required", "parallel_tool_calls": False},
        **{"temperature": 1.0, "seed": seed, "max_tokens": 400},
    }
    choices = [await choice_of(client, {**body, "num_draft_tokens": count}) for count in (most_drafts, 0)]
    return [*choices, schemas]


def judge(drafted: dict[str, Any], plain: dict[str, Any], schemas: dict[str, Any]) -> str:
    """``valid``, ``cut``, or what is wrong."""
    calls = [
        [(call["function"]["name"], call["function"]["arguments"]) for call in choice["message"].get("tool_calls", [])]
        for choice in (drafted, plain)
    ]
    if calls[0] != calls[1] or drafted["finish_reason"] != plain["finish_reason"]:
        return "other without drafts"
    if drafted["finish_reason"] == "length":
        return "cut"
    ((name, arguments),) = calls[0]
    good = drafted["finish_reason"] == "tool_calls" and is_valid(json.loads(arguments), schemas[name])
    return "valid" if good else "not valid"


def main(
    conversations: Annotated[int, typer.Option(min=0)] = 64,
    calls: Annotated[int, typer.Option(min=0)] = 200,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of a turn.")] = 48,
    slots: Annotated[int, typer.Option(min=1)] = 4,
    draft_len: Annotated[int, typer.Option(min=1, help="The largest tier, K.")] = 7,
    backend: Annotated[str, typer.Option(help="Of wrap.")] = "eager",
    seed: Annotated[int, typer.Option(help="Of everything random here.")] = 0,
) -> None:
    """Exits with 1 when a text or a call is wrong."""
    model, tokenizer = random_chat_model(MAX_LEN)
    options = {"max_batch": slots, "max_len": MAX_LEN, "backend": backend, "max_waiting": 4 * conversations + 16}
    with wrap(model, ["prediction", "ngram"], tiers=(0, draft_len), scores=True, **options) as spec:
        service = Service(spec, tokenizer, "tiny", ServeOptions())

        async def talk(address: str) -> tuple[list[list[dict[str, Any]]], Counter[str]]:
            counts: Counter[str] = Counter()
            async with client_of(address) as client:
                rngs = [random.Random(f"{seed} {index}") for index in range(conversations)]
                return list(await asyncio.gather(*(converse(client, rng, new_tokens, counts) for rng in rngs))), counts

        async def call(address: str) -> Counter[str]:
            found: Counter[str] = Counter()
            async with client_of(address) as client:
                limit = asyncio.Semaphore(slots)

                async def one(index: int) -> None:
                    async with limit:
                        drafted, plain, schemas = await call_tools(client, seed * calls + index, draft_len)
                    found[judge(drafted, plain, schemas)] += 1

                await asyncio.gather(*(one(index) for index in range(calls)))
            return found

        with listening(service) as address:
            started = time.perf_counter()
            talked, counts = asyncio.run(talk(address))
            typer.echo(f"{conversations} conversations in {time.perf_counter() - started:.0f} s")
            started = time.perf_counter()
            called = asyncio.run(call(address))
            typer.echo(f"{calls} calls with drafts and without in {time.perf_counter() - started:.0f} s")
    turns = sum(len(messages) // 2 for messages in talked)
    wrong = [problem for messages in talked for problem in wrong_turns(model, tokenizer, messages, new_tokens)]
    typer.echo(f"{turns} turns, {counts['left']} of them left once before: {len(wrong)} texts are not generate's")
    typer.echo("calls: " + ", ".join(f"{count} {what}" for what, count in sorted(called.items())))
    for problem in wrong[:10]:
        typer.echo(problem, err=True)
    raise typer.Exit(1 if wrong or called.keys() - {"valid", "cut"} else 0)


if __name__ == "__main__":
    typer.run(main)

"""Does a server of several replicas stay sound while replicas are killed? Ray Serve over a tiny random model.

``python -m benchmarks.ray_load --replicas 2 --requests 200 --kills 3``; exit code 1 if a text is wrong, a request
hangs, or one ends with an error that it may not have. It measures no speed. It needs
``pip install 'speccompile[serve,ray]'``.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import httpx2
import ray
import typer
from ray import serve

from benchmarks.server_in_process import choice_of, client_of, greedy_answer, pieces, random_chat_model
from speccompile import wrap
from speccompile.serve.options import ServeOptions
from speccompile.serve.replicas.ray_serve import Replica, ray_app
from speccompile.serve.service import Service

MAX_LEN, SLOTS, MAX_WAITING = 512, 4, 64
PATIENCE = 180.0
#: The error of a stream whose replica died.
CUT = "the replica died"
PORT = 8123
APP = "speccompile"


def make_service() -> Service:
    """What each replica serves."""
    model, tokenizer = random_chat_model(MAX_LEN)
    options: dict[str, Any] = {"max_batch": SLOTS, "max_len": MAX_LEN, "backend": "eager", "max_waiting": MAX_WAITING}
    return Service(wrap(model, "ngram", tiers=(0, 3), scores=True, **options), tokenizer, "tiny", ServeOptions())


@dataclass
class Load:
    """One run over a server at ``address``.

    Args:
        answers: greedy answers, by content of the user's message.
    """

    address: str
    answers: dict[str, str]
    new_tokens: int
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)

    async def run(self, requests: int, at_once: int, kills: int) -> None:
        """Requests, so many at once. Replicas are killed at random moments meanwhile."""
        kill_at = set(self.rng.sample(range(requests // 4, requests), kills))
        free = asyncio.Semaphore(at_once)
        tasks = []
        async with client_of(self.address) as client:
            for index in range(requests):
                await free.acquire()
                tasks.append(asyncio.create_task(self._one(client, index)))
                tasks[-1].add_done_callback(lambda _: free.release())
                if index in kill_at:
                    self.counts["killed"] += await asyncio.to_thread(_kill_a_replica, self.rng)
            await asyncio.gather(*tasks)

    async def _one(self, client: httpx2.AsyncClient, index: int) -> None:
        content = self.rng.choice(list(self.answers))
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": self.new_tokens, "temperature": 0}
        streamed = index % 2 == 0
        try:
            text = await asyncio.wait_for(self._streamed(client, body) if streamed else _whole(client, body), PATIENCE)
        except TimeoutError:
            self.problems.append(f"no end after {PATIENCE:.0f} s")
        except Exception as error:
            self.problems.append(f"{'streamed' if streamed else 'whole'}: {error!r}")
        else:
            expected = self.answers[content]
            if not (expected.startswith(text.removesuffix(CUT)) if text.endswith(CUT) else text == expected):
                self.problems.append(f"{text!r} is not {expected!r}")
            self.counts["cut" if text.endswith(CUT) else "streamed" if streamed else "whole"] += 1

    async def _streamed(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
        text = ""
        try:
            async for piece in pieces(client, body):
                text += piece
        except RuntimeError as error:
            # With nothing passed on, the request belongs to another replica.
            if CUT not in str(error):
                raise
            return text + CUT
        return text


async def _whole(client: httpx2.AsyncClient, body: dict[str, Any]) -> str:
    return str((await choice_of(client, body))["message"]["content"])


def _kill_a_replica(rng: random.Random) -> int:
    """As the kernel does when memory is short: 1 if a replica ran. Ray names its processes after their deployments."""
    running = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if f"ServeReplica:{APP}:{Replica.__name__}" in path.read_text():
                running.append(int(path.parent.name))
    if running:
        os.kill(rng.choice(running), signal.SIGKILL)
    return bool(running)


def main(
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    requests: Annotated[int, typer.Option(min=8)] = 200,
    at_once: Annotated[int, typer.Option(min=1, help="Requests that run at the same time.")] = 12,
    kills: Annotated[int, typer.Option(min=0, help="Replicas that are killed at random moments.")] = 3,
    new_tokens: Annotated[int, typer.Option(min=1)] = 60,
    seed: Annotated[int, typer.Option()] = 0,
) -> None:
    """Exits with 1 when something is wrong."""
    model, tokenizer = random_chat_model(MAX_LEN)
    contents = [f"the river {number} and the end" for number in range(24)]
    answers = {
        content: greedy_answer(model, tokenizer, [{"role": "user", "content": content}], new_tokens)
        for content in contents
    }
    ray.init(num_cpus=replicas, include_dashboard=False, configure_logging=False)
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        app = ray_app(
            make_service,
            threads=1,
            num_replicas=replicas,
            ray_actor_options={"num_cpus": 0.5},
            health_check_period_s=1,
        )
        serve.run(app, name=APP)
        load = Load(f"http://127.0.0.1:{PORT}", answers, new_tokens, random.Random(seed))
        started = time.monotonic()
        asyncio.run(load.run(requests, at_once, kills))
        typer.echo(f"{requests} requests in {time.monotonic() - started:.0f} s: {dict(load.counts)}")
    finally:
        serve.shutdown()
        ray.shutdown()
    for problem in load.problems[:20]:
        typer.echo(problem, err=True)
    raise typer.Exit(1 if load.problems else 0)


if __name__ == "__main__":
    typer.run(main)

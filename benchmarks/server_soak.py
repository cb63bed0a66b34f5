"""Does the server stay sound under faults? Chats, beside dropped connections, cancelled streams, malformed bodies and a
callback that raises.

``python -m benchmarks.server_soak --minutes 60``; a tiny random model in the same process, and exit code 1 if a text is
wrong, a request hangs, a slot is lost, or memory grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx2
import torch
import typer

from benchmarks.memory import resident_bytes
from benchmarks.server_in_process import (
    CHAT,
    choice_of,
    client_of,
    greedy_answer,
    listening,
    pieces,
    random_chat_model,
)
from speccompile import wrap
from speccompile.errors import QueueFull, RequestFailed
from speccompile.runtime.engine import Engine
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service

MAX_LEN = 512
MAX_BODY_BYTES = 64 * 1024
#: Of all requests, those of each kind.
SHARES = {"whole": 40, "streamed": 30, "left": 12, "dropped": 6, "malformed": 8, "raises": 4}
#: A request that takes longer hangs.
PATIENCE = 120.0
#: Memory may grow by this share after the first part of the time, and is read so often; of a short run it says nothing.
GROWTH, WARM_UP = 0.02, 1 / 6
READINGS, LINES = 600, 20
LEAST_SECONDS = 300.0
MALFORMED: tuple[tuple[bytes, int], ...] = (
    (b"{", 400),
    (b"\xff\xfe{}", 400),
    (b"[1]", 400),
    (b'{"a":' * 2000 + b"1" + b"}" * 2000, 400),
    (b'{"messages": []}', 400),
    (b'{"messages": [{"role": "user", "content": "a"}], "top_q": 1}', 400),
    (b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 1e99}', 400),
    (b'{"messages": "' + b"a" * MAX_BODY_BYTES + b'"}', 413),
)


class Deliberate(Exception):
    """What the callback raises."""


class Raises:
    """A streamer that raises at its second token."""

    def __init__(self) -> None:
        self._calls = 0

    def put(self, value: torch.Tensor) -> None:
        self._calls += 1
        if self._calls == 3:
            raise Deliberate

    def end(self) -> None: ...


@dataclass
class Soak:
    """One run.

    Args:
        address: of the server over ``engine``.
        answers: greedy answers, by content of the user's message.
        rate: requests a second, in the mean.
    """

    address: str
    engine: Engine
    answers: dict[str, str]
    new_tokens: int
    rate: float
    rng: random.Random
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)

    async def run(self, seconds: float) -> None:
        """Requests arrive for ``seconds``, and end."""
        kinds = list(SHARES)
        tasks: set[asyncio.Task[None]] = set()
        started = time.monotonic()
        watching = asyncio.create_task(self._watch(started, seconds))
        async with client_of(self.address) as client:
            while time.monotonic() - started < seconds:
                kind = self.rng.choices(kinds, list(SHARES.values()))[0]
                tasks.add(asyncio.create_task(self._one(client, kind)))
                tasks = {task for task in tasks if not task.done()}
                await asyncio.sleep(self.rng.expovariate(self.rate))
            await asyncio.gather(*tasks)
        watching.cancel()
        await self._check_idle()

    async def _watch(self, started: float, seconds: float) -> None:
        while True:
            now = time.monotonic() - started
            if len(self.memory) % (READINGS // LINES) == 0:
                typer.echo(self._line(now))
            self.memory.append((now, resident_bytes()))
            await asyncio.sleep(seconds / READINGS)

    def _line(self, now: float) -> str:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(self.counts.items()))
        waiting, problems = self.engine.capacity().waiting, len(self.problems)
        return f"{now:6.0f} s, {resident_bytes() / 2**20:.1f} MiB, {waiting} waiting, {counts}, {problems} problems"

    async def _one(self, client: httpx2.AsyncClient, kind: str) -> None:
        ask: Callable[[httpx2.AsyncClient], Awaitable[str]] = getattr(self, f"_{kind}")
        try:
            self.counts[await asyncio.wait_for(ask(client), PATIENCE)] += 1
        except TimeoutError:
            self.problems.append(f"{kind}: no end after {PATIENCE:.0f} s")
        except httpx2.HTTPStatusError as error:
            if error.response.status_code == 429:
                self.counts["full"] += 1
            else:
                self.problems.append(f"{kind}: status {error.response.status_code}")
        except Exception as error:
            self.problems.append(f"{kind}: {error!r}")

    def _body(self) -> dict[str, Any]:
        content = self.rng.choice(list(self.answers))
        body = {"messages": [{"role": "user", "content": content}], "max_tokens": self.new_tokens, "temperature": 0}
        if self.rng.random() < 0.3:
            predicted = self.rng.choice(list(self.answers.values()))
            body["prediction"] = {"type": "content", "content": predicted}
        return body

    def _check(self, kind: str, body: dict[str, Any], text: str, *, whole: bool = True) -> str:
        expected = self.answers[body["messages"][0]["content"]]
        if text != expected if whole else not expected.startswith(text):
            self.problems.append(f"{kind}: {text!r} is not {expected!r}")
        return kind

    async def _whole(self, client: httpx2.AsyncClient) -> str:
        body = self._body()
        return self._check("whole", body, (await choice_of(client, body))["message"]["content"])

    async def _streamed(self, client: httpx2.AsyncClient) -> str:
        body = self._body()
        return self._check("streamed", body, "".join([piece async for piece in pieces(client, body)]))

    async def _left(self, client: httpx2.AsyncClient) -> str:
        """Leave a stream after some pieces."""
        body, text, most = self._body(), "", self.rng.randint(1, 12)
        async with contextlib.aclosing(pieces(client, body)) as stream:
            async for piece in stream:
                text += piece
                most -= 1
                if not most:
                    break
        return self._check("left", body, text, whole=False)

    async def _dropped(self, client: httpx2.AsyncClient) -> str:
        """Drop a connection in the body, or before the answer."""
        data = b'{"messages": [{"role": "user", "content": "the river"}], "max_tokens": 200}'
        head = (
            f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
        )
        host, _, port = self.address.removeprefix("http://").partition(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(head.encode() + data[: self.rng.choice([0, 20, len(data)])])
        await writer.drain()
        await asyncio.sleep(self.rng.random() / 10)
        if self.rng.random() < 0.5:
            # A reset, not an orderly end.
            linger = (1).to_bytes(4, "little") + (0).to_bytes(4, "little")
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.close()
        return "dropped"

    async def _malformed(self, client: httpx2.AsyncClient) -> str:
        data, status = self.rng.choice(MALFORMED)
        answer = await client.post(CHAT, content=data, headers={"Content-Type": "application/json"})
        if answer.status_code != status or "message" not in answer.json()["error"]:
            self.problems.append(f"malformed: {data[:40]!r} was answered by {answer.status_code}")
        return "malformed"

    async def _raises(self, client: httpx2.AsyncClient) -> str:
        """A request of this process, whose callback raises."""

        def submit() -> str:
            try:
                self.engine.submit([1, 5, 6], max_new_tokens=8, streamer=Raises()).result()
                self.problems.append("raises: its callback's error was not raised")
            except QueueFull:
                return "full"
            except RequestFailed as error:
                if not isinstance(error.__cause__, Deliberate):
                    self.problems.append(f"raises: {error!r}")
            return "raises"

        return await asyncio.to_thread(submit)

    async def _check_idle(self) -> None:
        """No request is left, and all slots are free."""
        until = time.monotonic() + PATIENCE
        while not self.engine.idle and time.monotonic() < until:
            await asyncio.sleep(0.05)
        capacity = self.engine.capacity()
        if capacity.free_slots != capacity.slots or capacity.waiting:
            self.problems.append(f"{capacity} when no client is left")

    def check_whole_run(self, seconds: float) -> None:
        """What can be said only of a run that was long enough."""
        if seconds < LEAST_SECONDS:
            return
        self.problems += [f"{kind}: none has ended" for kind in SHARES if not self.counts[kind]]
        if self.growth > GROWTH:
            self.problems.append(f"memory grew by {self.growth:.1%}")

    @property
    def resident(self) -> tuple[float, float, float]:
        """Bytes at the end of the warm-up and at the end, each the median of a tenth of the rest, and the most of that
        rest."""
        end = self.memory[-1][0]
        later = [size for moment, size in self.memory if moment >= end * WARM_UP]
        part = max(1, len(later) // 10)
        return statistics.median(later[:part]), statistics.median(later[-part:]), max(later)

    @property
    def growth(self) -> float:
        """Of memory, from the end of the warm-up on."""
        first, last, _ = self.resident
        return last / first - 1


def main(
    minutes: Annotated[float, typer.Option(min=0.05, help="Requests arrive for so long.")] = 10.0,
    rate: Annotated[float, typer.Option(min=0.1, help="Arrivals a second, in the mean (Poisson).")] = 4.0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens of an answer.")] = 40,
    slots: Annotated[int, typer.Option(min=1)] = 3,
    max_waiting: Annotated[int, typer.Option(min=1, help="Of the queue.")] = 16,
    seed: Annotated[int, typer.Option(help="Of everything random here.")] = 0,
) -> None:
    """Exits with 1 when something is wrong."""
    model, tokenizer = random_chat_model(MAX_LEN)
    contents = [f"the river {number} and the end" for number in range(40)]
    answers = {
        content: greedy_answer(model, tokenizer, [{"role": "user", "content": content}], new_tokens)
        for content in contents
    }
    options = {"max_batch": slots, "max_len": MAX_LEN, "backend": "eager", "max_waiting": max_waiting}
    with wrap(model, ["prediction", "ngram"], tiers=(0, 1, 3), scores=True, **options) as spec:
        service = Service(spec, tokenizer, "tiny", ServeOptions(max_body_bytes=MAX_BODY_BYTES))
        with listening(service) as address:
            soak = Soak(address, spec.engine, answers, new_tokens, rate, random.Random(seed))
            asyncio.run(soak.run(60 * minutes))
    soak.check_whole_run(60 * minutes)
    first, last, most = (size / 2**20 for size in soak.resident)
    typer.echo(f"{sum(soak.counts.values())} requests in {minutes:g} minutes: {dict(sorted(soak.counts.items()))}")
    typer.echo(
        f"resident memory {first:.1f} MiB after the warm-up, {last:.1f} MiB in the end ({soak.growth:+.2%}), "
        f"at most {most:.1f} MiB"
    )
    typer.echo(f"wrong texts, requests that hung, and other problems: {len(soak.problems)}")
    for problem in soak.problems[:20]:
        typer.echo(problem, err=True)
    raise typer.Exit(1 if soak.problems else 0)


if __name__ == "__main__":
    typer.run(main)

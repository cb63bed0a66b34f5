"""The same chats over HTTP, served by ``speccompile serve`` and by ``transformers serve``.

``python -m benchmarks.server --prompts FILE --count 16 --rate 0.5``; see README.md beside this file.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Annotated, Any

import httpx2
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.memory import peak_bytes
from benchmarks.prompts import choose_prompts
from benchmarks.serving import arrivals, percentile
from speccompile import pretrained
from speccompile.cli.session import session
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task

START_SECONDS = 600
ANSWER_SECONDS = 1800


@dataclass
class Answer:
    """One chat: seconds since the first arrival at which it was asked, and at which each piece of text came."""

    asked: float
    pieces: list[float] = field(default_factory=list)
    tokens: int = 0
    text: str = ""


@dataclass
class Figures:
    """What one server did with all chats."""

    server: str
    answers: list[Answer]
    peak_mebibytes: float

    @property
    def tokens_per_second(self) -> float:
        ends = [answer.pieces[-1] for answer in self.answers]
        return sum(answer.tokens for answer in self.answers) / (
            max(ends) - min(answer.asked for answer in self.answers)
        )

    @property
    def first_tokens(self) -> list[float]:
        return [answer.pieces[0] - answer.asked for answer in self.answers]

    @property
    def per_token(self) -> list[float]:
        """Of each answer the seconds of a token after the first piece. Pieces have several tokens where a step emits
        several, so the time between pieces alone says little."""
        return [
            (answer.pieces[-1] - answer.pieces[0]) / (answer.tokens - 1) for answer in self.answers if answer.tokens > 1
        ]


@contextlib.contextmanager
def running(
    command: Sequence[str], address: str, log: int | IO[bytes] = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[bytes]]:
    """A server's process, once it answers.

    Args:
        log: where its output goes.

    Raises:
        RuntimeError: it ends, or does not answer in time.
    """
    process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until = time.monotonic() + START_SECONDS
        while not _answers(address):
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"{' '.join(command)} does not serve")
            time.sleep(0.2)
        yield process
    finally:
        process.terminate()
        process.wait(60)


def _answers(address: str) -> bool:
    try:
        return httpx2.get(f"{address}/health", timeout=5).status_code == 200
    except httpx2.TransportError:
        return False


async def ask_all(
    address: str, model: str, prompts: Sequence[str], moments: Sequence[float], new_tokens: int
) -> list[Answer]:
    """Ask each of ``prompts`` at its moment."""
    async with httpx2.AsyncClient(base_url=address, timeout=ANSWER_SECONDS) as client:
        start = time.perf_counter()

        async def ask(prompt: str, moment: float) -> Answer:
            await asyncio.sleep(max(0.0, start + moment - time.perf_counter()))
            return await _ask(client, model, prompt, new_tokens, start)

        return list(await asyncio.gather(*map(ask, prompts, moments)))


async def _ask(client: httpx2.AsyncClient, model: str, prompt: str, new_tokens: int, start: float) -> Answer:
    # What both servers know; transformers' has the usage in its last chunk anyway.
    body: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": new_tokens,
        "temperature": 0,
        "stream": True,
    }
    if model == SMOLLM2:
        body["stream_options"] = {"include_usage": True}
    answer = Answer(time.perf_counter() - start)
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code}: {(await response.aread()).decode()}")
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                _read(answer, json.loads(line.removeprefix("data: ")), time.perf_counter() - start)
    return answer


def _read(answer: Answer, chunk: dict[str, Any], moment: float) -> None:
    if "error" in chunk:
        raise RuntimeError(str(chunk["error"]))
    for choice in chunk["choices"]:
        if text := choice["delta"].get("content"):
            answer.pieces.append(moment)
            answer.text += text
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]


def measure(
    name: str, command: Sequence[str], address: str, model: str, prompts: Sequence[str], rate: float, new_tokens: int
) -> Figures:
    """Serve all chats, after one that warms the server up."""
    with running(command, address) as process:
        asyncio.run(ask_all(address, model, ["Say a few words about warm water."], [0.0], 8))
        answers = asyncio.run(ask_all(address, model, prompts, arrivals(rate, len(prompts), 0), new_tokens))
        return Figures(name, answers, peak_bytes(process.pid) / 2**20)


def table(figures: Sequence[Figures]) -> Table:
    reference = [answer.text for answer in figures[0].answers]
    shown = Table(title=f"{len(reference)} chats", title_justify="left")
    shown.add_column("")
    for heading in ("tokens/s", "first token\np50 / p95", "time per token\np50 / p95", "peak memory", "same texts"):
        shown.add_column(heading, justify="right")
    for item in figures:
        same = sum(answer.text == text for answer, text in zip(item.answers, reference, strict=True))
        shown.add_row(
            item.server,
            f"{item.tokens_per_second:.1f}",
            f"{percentile(item.first_tokens, 50):.2f} / {percentile(item.first_tokens, 95):.2f} s",
            f"{percentile(item.per_token, 50) * 1e3:.0f} / {percentile(item.per_token, 95) * 1e3:.0f} ms",
            f"{item.peak_mebibytes:.0f} MiB",
            f"{same} of {len(reference)}",
        )
    return shown


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def main(
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals a second, in the mean (Poisson).")] = 0.5,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a chat.")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time, of both servers.")] = 4,
    mode: Annotated[
        list[str] | None, typer.Option(help="How to draft; may repeat. none and ngram if left out.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Serve SmolLM2 by one server after another."""
    with session():
        folder = str(pretrained.fetch_smollm2())
        texts = [prompt.text for prompt in choose_prompts(prompts, count)]
        figures = []
        port = free_port()
        address = f"http://127.0.0.1:{port}"
        batching = ["--continuous-batching", "--cb-block-size", "64", "--cb-num-blocks", str(slots * 17)]
        transformers = [str(Path(sys.executable).with_name("transformers")), "serve", folder, "--device", "cpu"]
        transformers += ["--dtype", "float32", "--host", "127.0.0.1", "--port", str(port)]
        ours = [sys.executable, "-m", "speccompile", "serve", SMOLLM2, "--port", str(port)]
        ours += ["--max-batch", str(slots), "--max-len", "1024", "--max-waiting", str(len(texts))]
        servers = [
            ("transformers serve", transformers, folder),
            ("transformers serve --continuous-batching", [*transformers, *batching], folder),
            *(
                (f"speccompile serve --mode {name}", [*ours, "--mode", name], SMOLLM2)
                for name in mode or ("none", "ngram")
            ),
        ]
        for name, command, model in servers:
            with task(f"serve {len(texts)} chats by {name}"):
                figures.append(measure(name, command, address, model, texts, rate, new_tokens))
        Console(width=140).print(table(figures))
        if json_file is not None:
            report = {"machine": describe(), "settings": {"rate": rate, "new_tokens": new_tokens, "slots": slots}}
            report["servers"] = [asdict(item) for item in figures]
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

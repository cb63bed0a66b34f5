"""Does a short prompt wait for long ones? Clients over HTTP, most with short prompts, some with long ones.

``python -m benchmarks.first_token --minutes 5``; see README.md beside this file. Exit code 1 if a text is not that of
transformers' ``generate``, or if the first token of short prompts comes too late.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import httpx2
import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from benchmarks.machine import describe
from benchmarks.server_in_process import client_of, listening
from benchmarks.serving import percentile
from speccompile import wrap
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.serve.options import ServeOptions
from speccompile.serve.service import Service
from speccompile.utils.progress import task

WORDS = [
    "river",
    "mill",
    "flour",
    "sack",
    "book",
    "count",
    "stone",
    "road",
    "tree",
    "lamp",
    "bread",
    "wheel",
    "house",
    "green",
    "water",
    "light",
    "old",
    "door",
]
#: The share of the requests whose client leaves: half of these before the first token, or after some pieces.
LEAVES, MOST_PIECES = 0.1, 12
#: Rows of a batch of ``generate``, and the tokens of all its prompts.
ROWS, BATCH_TOKENS = 16, 4096
#: Two logits that are closer than this are a tie of floating point.
TIE = 1e-3
BESIDE, ALONE = "short prompts beside long ones", "short prompts alone"


@dataclass
class Answer:
    """One request: seconds from sending it to its first token, None without one, and why it failed."""

    prompt: str
    long: bool
    left: bool
    first_token: float | None = None
    text: str = ""
    error: str | None = None


@dataclass(frozen=True)
class Load:
    """The work of all clients.

    Args:
        clients: of which ``long_clients`` send prompts of ``long_words`` words, the others of ``short_words``.
    """

    clients: int
    long_clients: int
    short_words: int
    long_words: int
    new_tokens: int
    seconds: float


@dataclass(frozen=True)
class Run:
    """The answers of one load, and the texts that are wrong."""

    name: str
    answers: list[Answer]
    wrong: list[str]

    def first_tokens(self, *, long: bool) -> list[float]:
        """Seconds to the first token of each request with such a prompt."""
        return [answer.first_token for answer in self.answers if answer.long is long and answer.first_token is not None]


async def run_load(address: str, load: Load, seed: int) -> list[Answer]:
    """The answers to all clients. Each client sends its next request when the one before has ended."""
    answers: list[Answer] = []
    until = time.perf_counter() + load.seconds
    async with client_of(address) as client:

        async def send(number: int) -> None:
            rng, long = random.Random(f"{seed} {number}"), number < load.long_clients
            while time.perf_counter() < until:
                words = load.long_words if long else load.short_words
                answer = Answer(" ".join(rng.choices(WORDS, k=words)), long, rng.random() < LEAVES)
                await _ask(client, answer, load.new_tokens, rng)
                answers.append(answer)

        await asyncio.gather(*(send(number) for number in range(load.clients)))
    return answers


async def _ask(client: httpx2.AsyncClient, answer: Answer, new_tokens: int, rng: random.Random) -> None:
    patience, pieces = None, 0
    if answer.left and rng.random() < 0.5:
        patience = rng.random()
    elif answer.left:
        pieces = rng.randint(1, MOST_PIECES)
    try:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(_read(client, answer, new_tokens, pieces), patience)
    except (httpx2.HTTPError, RuntimeError) as error:
        answer.error = repr(error)


async def _read(client: httpx2.AsyncClient, answer: Answer, new_tokens: int, most_pieces: int) -> None:
    """Read the stream of ``answer``, or its first pieces."""
    body: dict[str, Any] = {"prompt": answer.prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True}
    asked, pieces = time.perf_counter(), 0
    async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            if answer.first_token is None:
                answer.first_token = time.perf_counter() - asked
            answer.text += event["choices"][0]["text"]
            pieces += 1
            if pieces == most_pieces:
                return


def wrong_texts(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, answers: Sequence[Answer], new_tokens: int
) -> list[str]:
    """Faults in the texts of ``answers``. A text whose client left is the beginning of the right one; a request that
    failed has none."""
    found = [f"after {answer.prompt[:40]!r}...: {answer.error}" for answer in answers if answer.error is not None]
    ended = [answer for answer in answers if answer.error is None and (answer.text or not answer.left)]
    for batch in _batches(tokenizer, ended):
        right = _most_likely(model, tokenizer, batch, new_tokens)
        batch = [item for item, is_right in zip(batch, right, strict=True) if not is_right]
        if not batch:
            continue
        expected = _generate(model, [ids for _, ids in batch], new_tokens)
        for (answer, ids), tokens in zip(batch, expected, strict=True):
            text = str(tokenizer.decode(tokens, skip_special_tokens=True))
            same = text.startswith(answer.text) if answer.left else text == answer.text
            if not same and not _is_tie(model, tokenizer, ids, answer.text, new_tokens):
                found.append(f"after {answer.prompt[:40]!r}...: {answer.text!r} is not {text!r}")
    return found


def _batches(tokenizer: PreTrainedTokenizerBase, answers: Sequence[Answer]) -> Iterator[list[tuple[Answer, list[int]]]]:
    """Answers of similar length with the ids of their prompts."""
    encoded = sorted(((answer, list(tokenizer(answer.prompt)["input_ids"])) for answer in answers), key=_length)
    for long, group in itertools.groupby(encoded, key=lambda item: item[0].long):
        of_group = list(group)
        rows = max(1, min(ROWS, BATCH_TOKENS // len(of_group[-1][1]))) if long else ROWS
        yield from (of_group[start : start + rows] for start in range(0, len(of_group), rows))


def _length(item: tuple[Answer, list[int]]) -> tuple[bool, int]:
    return item[0].long, len(item[1])


def _most_likely(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, batch: Sequence[tuple[Answer, list[int]]], length: int
) -> list[bool]:
    """Whether the text of each answer, tokenized again, has the most likely token at each position: then ``generate``
    has the same text, and one forward of the model has shown it. Other texts may be right too."""
    texts = [list(tokenizer(answer.text, add_special_tokens=False)["input_ids"]) for answer, _ in batch]
    ids, mask = _left_padded([[*prompt, *text] for (_, prompt), text in zip(batch, texts, strict=True)])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    most = max(map(len, texts))
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions, logits_to_keep=most + 1).logits
    best = logits.argmax(-1)[:, :-1].tolist()
    return [
        (answer.left or len(text) == length) and row[most - len(text) :] == text
        for (answer, _), text, row in zip(batch, texts, best, strict=True)
    ]


def _left_padded(rows: Sequence[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids ``[B, T]`` and their mask."""
    longest = max(map(len, rows))
    ids = torch.tensor([[0] * (longest - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows])
    return ids, mask


def _generate(model: PreTrainedModel, prompts: Sequence[list[int]], new_tokens: int) -> list[list[int]]:
    ids, mask = _left_padded(prompts)
    config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    out = model.generate(input_ids=ids, attention_mask=mask, generation_config=config, eos_token_id=None)
    tokens: list[list[int]] = out[:, ids.shape[1] :].tolist()
    return tokens


def _is_tie(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, ids: list[int], text: str, new_tokens: int
) -> bool:
    """Whether the first token in which ``text`` and that of ``generate`` differ is equally likely in both."""
    (tokens,) = _generate(model, [ids], new_tokens)
    with torch.no_grad():
        logits = model(torch.tensor([ids + tokens])).logits[0, len(ids) - 1 : -1]
    shown = [str(tokenizer.decode(tokens[: place + 1], skip_special_tokens=True)) for place in range(len(tokens))]
    differs = next((place for place, part in enumerate(shown) if not text.startswith(part.rstrip("\ufffd"))), None)
    if differs is None:
        return True
    best = logits[differs].topk(2).values
    return bool(best[0] - best[1] < TIE)


def ratio(runs: Sequence[Run]) -> float:
    """First token of short prompts at p95, beside long ones and alone."""
    beside, alone = (percentile(run.first_tokens(long=False), 95) for run in runs)
    return beside / alone


def table(runs: Sequence[Run], title: str) -> Table:
    shown = Table(title=title, title_justify="left")
    shown.add_column("")
    for heading in ("requests", "left", "first token, short\np50 / p95", "first token, long\np50 / p95", "wrong texts"):
        shown.add_column(heading, justify="right")
    for run in runs:
        times = [run.first_tokens(long=long) for long in (False, True)]
        shown.add_row(
            run.name,
            str(len(run.answers)),
            str(sum(answer.left for answer in run.answers)),
            *(f"{percentile(of, 50):.2f} / {percentile(of, 95):.2f} s" if of else "-" for of in times),
            str(len(run.wrong)),
        )
    return shown


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    address: Annotated[
        str | None,
        typer.Option(help="Of a server with that model, such as http://127.0.0.1:8000; else one is started."),
    ] = None,
    clients: Annotated[int, typer.Option(min=2)] = 16,
    long_share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Of the clients, those with long prompts.")] = 0.3,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time, of a server that is started.")] = 16,
    short_words: Annotated[int, typer.Option(min=1, help="Of a short prompt.")] = 20,
    long_words: Annotated[int, typer.Option(min=1, help="Of a long prompt.")] = 1700,
    new_tokens: Annotated[int, typer.Option(min=2, help="Of each answer.")] = 32,
    minutes: Annotated[float, typer.Option(min=0.01, help="Of each of the two loads.")] = 5.0,
    most: Annotated[float, typer.Option(min=0.0, help="The greatest ratio of both p95 that passes.")] = 3.0,
    seed: Annotated[int, typer.Option(help="Of everything random here.")] = 0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    quick: Annotated[bool, typer.Option(help="A tiny model for seconds, to see that it runs.")] = False,
) -> None:
    """Exits with 1 when a text is wrong, or the ratio is too great."""
    options: dict[str, Any] = {"max_batch": slots, "max_len": 2048}
    if quick:
        # Its tokens are bytes.
        model, clients, short_words, long_words, new_tokens, minutes = "tiny", 4, 5, 60, 8, 1 / 120
        options = {"max_batch": 4, "max_len": 512, "tiers": (0, 3), "backend": "eager"}
    load_of = {BESIDE: round(clients * long_share), ALONE: 0}
    loads = {
        name: Load(clients, count, short_words, long_words, new_tokens, 60 * minutes) for name, count in load_of.items()
    }
    with session():
        target, tokenizer = load(model)
        with contextlib.ExitStack() as stack:
            if address is None:
                spec = stack.enter_context(wrap(target, "auto", predictions=True, scores=True, **options))
                # All clients have one address.
                service = Service(spec, tokenizer, model, ServeOptions(max_client_share=100))
                address = stack.enter_context(listening(service))
            # The first requests build what all need.
            asyncio.run(run_load(address, Load(2, 1, short_words, long_words, new_tokens, 0.1), seed=-1))
            answers = {}
            for number, (name, each) in enumerate(loads.items()):
                with task(name):
                    answers[name] = asyncio.run(run_load(address, each, seed=2 * seed + number))
        with task("compare texts with transformers' generate"):
            runs = [Run(name, of, wrong_texts(target, tokenizer, of, new_tokens)) for name, of in answers.items()]
    title = (
        f"{clients} clients, {short_words} and {long_words} words, {new_tokens} new tokens, {minutes:g} minutes each"
    )
    Console(width=None if sys.stdout.isatty() else 140).print(table(runs, title))
    found, wrong = ratio(runs), [text for run in runs for text in run.wrong]
    typer.echo(f"first token of short prompts at p95, beside long ones over alone: {found:.2f} (at most {most:g})")
    for text in wrong[:10]:
        typer.echo(text, err=True)
    if json_file is not None:
        report = {
            "machine": describe(),
            "model": model,
            "ratio": found,
            "loads": {n: asdict(of) for n, of in loads.items()},
        }
        report["answers"] = {run.name: [asdict(answer) for answer in run.answers] for run in runs}
        json_file.write_text(json.dumps(report, indent=1) + "\n")
    raise typer.Exit(1 if wrong or not found <= most else 0)


if __name__ == "__main__":
    typer.run(main)

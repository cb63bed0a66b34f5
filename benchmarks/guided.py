"""JSON that follows random schemas: does all of it parse, is it the same with and without drafts, how fast is it?

python -m benchmarks.guided --count 200
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track
from transformers import PreTrainedTokenizerBase

from speccompile import Speculator, wrap
from speccompile.cli.models import encode, load
from speccompile.cli.session import session
from speccompile.guides import Guide, json_schema_guide
from speccompile.runtime.request import Request

MAX_LEN = 1024
PREFILL_BUDGET = 512
#: More than the longest text of any of these schemas needs, but for names that are spelled byte by byte.
MAX_NEW_TOKENS = 640
THINGS = ("person", "book", "city", "recipe", "car", "film", "song", "parcel", "invoice", "football match")
NAMES = (
    "name",
    "title",
    "kind",
    "size",
    "price",
    "owner",
    "tags",
    "active",
    "year",
    "notes",
    "status",
    "parts",
    "code",
)
WORDS = ("small", "large", "red", "blue", "new", "used", "open", "closed", "draft", "final")

Schema = dict[str, Any]


def random_schema(rng: random.Random, depth: int = 0) -> Schema:
    """An object of one to five properties; every text that follows it comes to an end."""
    names = rng.sample(NAMES, rng.randint(1, 5 - 2 * depth))
    required = [name for name in names if rng.random() < 0.8]
    properties = {name: _random_value(rng, depth) for name in names}
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _random_value(rng: random.Random, depth: int) -> Schema:
    kind = rng.choice(["string", "integer", "boolean", "enum", "array", "object"][: 6 if depth < 2 else 4])
    if kind == "enum":
        return {"enum": rng.sample(WORDS, rng.randint(2, 4))}
    if kind == "array":
        items = rng.choice([_integer(3), {"type": "string", "maxLength": 8}, {"type": "boolean"}])
        return {"type": "array", "items": items, "maxItems": rng.randint(1, 4)}
    if kind == "object":
        return random_schema(rng, depth + 1)
    if kind == "integer":
        return _integer(rng.randint(1, 5))
    return {"type": kind, "maxLength": rng.randint(3, 16)} if kind == "string" else {"type": kind}


def _integer(digits: int) -> Schema:
    """An integer of at most ``digits`` digits."""
    return {"type": "integer", "minimum": 1 - 10**digits, "maximum": 10**digits - 1}


@dataclass(frozen=True)
class Job:
    schema: Schema
    guide: Guide
    prompt: list[int]
    #: Of :meth:`Engine.submit`.
    options: dict[str, Any]


def make_jobs(tokenizer: PreTrainedTokenizerBase, count: int, seed: int = 0) -> list[Job]:
    """Every other one is drawn, the others are greedy."""
    rng, jobs = random.Random(seed), []
    for index in range(count):
        schema = random_schema(rng)
        guide = json_schema_guide(schema, tokenizer)
        text = f"Describe a {rng.choice(THINGS)} as one JSON object that follows this schema: {json.dumps(schema)}"
        options: dict[str, Any] = {"max_new_tokens": MAX_NEW_TOKENS}
        if index % 2:
            options |= {"do_sample": True, "seed": index, "temperature": 0.8}
        prompt = encode(tokenizer, text, True)[0].tolist()
        jobs.append(Job(schema, guide, prompt, options))
    return jobs


@dataclass
class Outcome:
    """``texts`` are token ids, ``seconds`` those of the steps."""

    requests: list[Request]
    seconds: float = 0.0

    @property
    def texts(self) -> list[list[int]]:
        return [request.new_tokens for request in self.requests]

    @property
    def tokens_per_second(self) -> float:
        return sum(map(len, self.texts)) / self.seconds


def decode(spec: Speculator, jobs: Sequence[Job], draft_len: int) -> Outcome:
    """All of them, as many at a time as there are slots."""
    spec.set_tier(draft_len)
    engine = spec.engine
    outcome = Outcome([engine.submit(job.prompt, guide=job.guide, **job.options) for job in jobs])
    for _ in track(iter(lambda: engine.idle, True), f"K={draft_len}", console=Console(stderr=True), total=None):
        started = time.perf_counter()
        engine.step()
        outcome.seconds += time.perf_counter() - started
    for request in outcome.requests:
        request.result()
    return outcome


def problem(tokenizer: PreTrainedTokenizerBase, job: Job, request: Request) -> str | None:
    """What is wrong with a text."""
    text = tokenizer.decode(request.new_tokens, skip_special_tokens=True)
    if request.finish_reason != "eos":
        return f"it ended by {request.finish_reason}: {text}"
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        return f"{error}: {text}"
    missing = set(job.schema["required"]) - value.keys()
    return f"no {missing}: {text}" if missing else None


def main(
    model: Annotated[str, typer.Option(help="smollm2, a folder or a hub id.")] = "smollm2",
    count: Annotated[int, typer.Option(help="Requests, each with its own schema.")] = 200,
    slots: Annotated[int, typer.Option(help="So many at a time.")] = 4,
    draft_len: Annotated[int, typer.Option(help="The tier that is compared with K=0.")] = 7,
    seed: int = 0,
    backend: str = "auto",
) -> None:
    """Exits with 1 when a text does not parse."""
    console = Console()
    with session():
        target, tokenizer = load(model)
        started = time.perf_counter()
        jobs = make_jobs(tokenizer, count, seed)
        seconds = time.perf_counter() - started
        console.print(f"{count} guides in {seconds:.1f} s")
        with wrap(
            target,
            "ngram",
            tiers=(0, draft_len),
            max_batch=slots,
            max_len=MAX_LEN,
            backend=backend,
            sampling=True,
            # No caller watches.
            prefill_budget=PREFILL_BUDGET,
        ) as spec:
            # Untimed: what runs first runs cold.
            for size in (draft_len, 0):
                decode(spec, jobs[: 2 * slots], size)
            spec.stats.reset()
            drafted = decode(spec, jobs, draft_len)
            acceptance_length = spec.stats.acceptance_length
            baseline = decode(spec, jobs, 0)
    wrong = [
        problem(tokenizer, job, request)
        for outcome in (drafted, baseline)
        for job, request in zip(jobs, outcome.requests, strict=True)
    ]
    for line in filter(None, wrong):
        console.print(line, markup=False)
    good = [sum(item is None for item in wrong[:count]), sum(item is None for item in wrong[count:])]
    equal = sum(a == b for a, b in zip(drafted.texts, baseline.texts, strict=True))
    lengths = sorted(map(len, drafted.texts))
    console.print(f"valid: {good[0]} of {count} at K={draft_len}, {good[1]} at K=0")
    console.print(f"equal at both: {equal} of {count}; new tokens: median {lengths[count // 2]}, most {lengths[-1]}")
    console.print(
        f"tokens/s: {drafted.tokens_per_second:.1f} at K={draft_len}, {baseline.tokens_per_second:.1f} at K=0; "
        f"acceptance length {acceptance_length:.2f}"
    )
    raise typer.Exit(0 if good == [count, count] else 1)


if __name__ == "__main__":
    typer.run(main)

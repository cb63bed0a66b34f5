"""Drafts of the tokens that a guide forces: ``python -m benchmarks.forced_tokens --option weights=int4``.

A tool call and an object of ten fields, greedy and drawn, each with the drafts of ``ngram`` and of the guide, whose
number the default policy chooses, and without drafts, in turns; and the steps of requests with and without a guide.
"""

from __future__ import annotations

import json
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from benchmarks.machine import describe
from speccompile import Speculator, wrap
from speccompile.cli.models import encode, load
from speccompile.cli.session import parse_options, parse_tiers, session
from speccompile.guides import Guide, json_schema_guide
from speccompile.serve.guide_process import compile_guide
from speccompile.serve.guide_source import GuideSource
from speccompile.serve.tool_grammar import DEFAULT_SYNTAX, GrammarTool, ToolGrammar

MAX_NEW_TOKENS = 300
FIELDS = ("title", "author", "publisher", "year", "pages", "language", "genre", "price", "isbn", "summary")
TOOLS = ("get_weather_forecast", "get_air_quality", "get_tide_times")
LAWS: dict[str, dict[str, Any]] = {"greedy": {}, "drawn": {"do_sample": True, "temperature": 1.0, "top_k": 0}}


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


@dataclass(frozen=True)
class Task:
    """A prompt and the guide of its answer."""

    prompt: str
    guide: Guide


def make_tasks(tokenizer: PreTrainedTokenizerBase) -> dict[str, Task]:
    """The tasks by name."""
    text, number = {"type": "string", "maxLength": 16}, {"type": "integer", "minimum": 0, "maximum": 9999}
    fields = _object({name: number if name in ("year", "pages", "price") else text for name in FIELDS})
    days = {"type": "integer", "minimum": 1, "maximum": 14}
    arguments = _object({"location": text, "unit": {"enum": ["celsius", "fahrenheit"]}, "days": days})
    tools = tuple(GrammarTool(name, arguments) for name in TOOLS)
    grammar = ToolGrammar(tools, DEFAULT_SYNTAX, required=True, parallel=False)
    call = compile_guide(GuideSource("tools", grammar.as_text()), tokenizer)
    return {
        "tool call": Task("What is the weather in Paris for the next three days?", call),
        "ten fields": Task("Describe the book Moby Dick as one JSON object.", json_schema_guide(fields, tokenizer)),
    }


def decode(spec: Speculator, ids: list[int], **options: Any) -> tuple[list[int], int, float]:
    """A text, how many of its tokens were drafts, and the seconds that it needed."""
    started = time.perf_counter()
    request = spec.engine.submit(ids, max_new_tokens=MAX_NEW_TOKENS, **options)
    text = request.result().token_ids
    return text, request.stats.accepted_tokens, time.perf_counter() - started


def step_milliseconds(spec: Speculator, ids: list[int], **options: Any) -> float:
    """The median time of a step at K=0."""
    spec.set_tier(0)
    request, seconds = spec.engine.submit(ids, max_new_tokens=60, **options), []
    while not request.finished:
        started = time.perf_counter()
        spec.engine.step()
        seconds.append(time.perf_counter() - started)
    return 1e3 * statistics.median(seconds[5:])


def main(
    model: Annotated[str, typer.Option(help="smollm2, a folder or a hub id.")] = "smollm2",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,3,7",
    rounds: Annotated[int, typer.Option(help="Texts of each task, with another seed each.")] = 5,
    option: Annotated[list[str] | None, typer.Option(help="Further options of wrap, NAME=VALUE.")] = None,
    json_: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None,
) -> None:
    """Exits with 1 if a text differs with drafts."""
    console, tasks_of = Console(), defaultdict[tuple[str, str], list[tuple[float, float, int, int, bool]]](list)
    with session():
        target, tokenizer = load(model)
        tasks = make_tasks(tokenizer)
        sizes: dict[str, Any] = {"tiers": parse_tiers(tiers), "max_batch": 1, "max_len": 1024, "sampling": True}
        with wrap(target, "ngram", **sizes, **parse_options(option or [])) as spec:
            for seed in range(rounds + 1):
                for name, task in tasks.items():
                    ids = encode(tokenizer, task.prompt, True)[0].tolist()
                    for law, options in LAWS.items():
                        own = options | ({"seed": seed} if options else {})
                        spec.set_tier(None)
                        text, accepted, drafted = decode(spec, ids, guide=task.guide, **own)
                        spec.set_tier(0)
                        plain_text, _, plain = decode(spec, ids, guide=task.guide, **own)
                        # The first round runs cold.
                        if seed:
                            row = (len(text) / plain, len(text) / drafted, accepted, len(text), text == plain_text)
                            tasks_of[name, law].append(row)
            free = encode(tokenizer, "Write a long story.", True)[0].tolist()
            kinds: dict[str, dict[str, Any]] = {
                "without options": {},
                "with another processor (repetition_penalty)": {"repetition_penalty": 1.0001},
                "with a guide": {"guide": json_schema_guide({"type": "string", "minLength": 400}, tokenizer)},
            }
            rounds_of = [
                {name: step_milliseconds(spec, free, **options) for name, options in kinds.items()}
                for _ in range(3 * rounds)
            ]
            steps = {name: statistics.median(each[name] for each in rounds_of) for name in kinds}
            ratios = {
                name: statistics.median(each[name] / each["without options"] for each in rounds_of) for name in kinds
            }
    table = Table("text", "tokens", "of them drafts", "tokens/s at K=0", "with drafts", "ratio", "the same")
    found = []
    for (name, law), rows in tasks_of.items():
        before, after, accepted, count = (statistics.median(column) for column in list(zip(*rows, strict=True))[:4])
        same, ratio = all(row[4] for row in rows), statistics.median(row[1] / row[0] for row in rows)
        figures = [f"{count:.0f}", f"{accepted:.0f}", f"{before:.1f}", f"{after:.1f}", f"{ratio:.2f}", str(same)]
        table.add_row(f"{name}, {law}", *figures)
        found.append({"text": name, "law": law, "tokens": count, "drafts": accepted, "ratio": ratio, "same": same})
        found[-1] |= {"tokens_per_second": [before, after]}
    console.print(table)
    for name, milliseconds in steps.items():
        console.print(f"a step at K=0 {name}: {milliseconds:.2f} ms, {ratios[name]:.2f} of one without options")
    if json_ is not None:
        result = {"machine": describe(), "options": option or [], "texts": found, "steps_ms": steps, "ratios": ratios}
        json_.write_text(json.dumps(result, indent=1) + "\n")
    raise typer.Exit(0 if all(entry["same"] for entry in found) else 1)


if __name__ == "__main__":
    typer.run(main)

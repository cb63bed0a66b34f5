"""Costs of guides on the host: ``python -m benchmarks.guide_costs``.

Each guide is compiled in a process of its own, which reports the seconds of CPU time and the memory that this added.
Masks are computed for all positions of a step: of 1 and 8 rows, at K=0 and K=7.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from benchmarks.isolated import rss_bytes
from benchmarks.machine import describe
from benchmarks.tool_schemas import random_schema
from speccompile.guides import Guide, json_schema_guide
from speccompile.pretrained import fetch_smollm2
from speccompile.sampling.allowed import unpacked
from speccompile.sampling.guide import GuideFollower
from speccompile.serve.guide_process import compile_guide
from speccompile.serve.guide_source import GuideSource
from speccompile.serve.tool_grammar import DEFAULT_SYNTAX, GrammarTool, ToolGrammar

ROUNDS = 30


def _tools(count: int) -> GuideSource:
    rng = random.Random(count)
    tools = tuple(GrammarTool(f"tool_{index}", random_schema(rng)) for index in range(count))
    return GuideSource("tools", ToolGrammar(tools, DEFAULT_SYNTAX, required=True, parallel=True).as_text())


def _optional(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"field_{index}": {"type": "string"} for index in range(count)}}


GUIDES: dict[str, Callable[[Any], Guide]] = {
    "12 tools": lambda tokenizer: compile_guide(_tools(12), tokenizer),
    "40 tools": lambda tokenizer: compile_guide(_tools(40), tokenizer),
    "60 optional fields": lambda tokenizer: json_schema_guide(_optional(60), tokenizer),
    "maxLength 65,536": lambda tokenizer: json_schema_guide({"type": "string", "maxLength": 65536}, tokenizer),
    "any JSON": lambda tokenizer: json_schema_guide(True, tokenizer),
}


def compile_one(name: str) -> dict[str, float]:
    """Milliseconds of CPU time and MiB of one compilation, its first mask included."""
    tokenizer = AutoTokenizer.from_pretrained(fetch_smollm2())
    # What all guides of a tokenizer share is made before.
    json_schema_guide({"const": 1}, tokenizer)
    compile_guide(_tools(1), tokenizer)
    memory, started = rss_bytes() or 0, time.thread_time()
    GUIDES[name](tokenizer)
    return {"ms": 1e3 * (time.thread_time() - started), "mib": ((rss_bytes() or 0) - memory) / 2**20}


def mask_microseconds(guide: Guide, rows: int, draft_len: int) -> float:
    """Median time of the masks of one step in the middle of a text."""
    eos = [guide.tokens.vocab_size - 1]
    followers = [GuideFollower(guide, eos, guide.tokens.vocab_size, 0) for _ in range(rows)]
    drafts, rng = list[int](), random.Random(0)
    writer = GuideFollower(guide, eos, guide.tokens.vocab_size, 0)
    for _ in range(24 + draft_len):
        *_, mask = writer.masks(torch.tensor(drafts, dtype=torch.int64), [])
        ids = unpacked(mask, guide.tokens.vocab_size).nonzero().flatten().tolist()
        allowed = [token for token in ids if token not in eos]
        drafts.append(rng.choice(allowed) if allowed else eos[0])
    text, drafts = torch.tensor(drafts[:24]), drafts[24:]
    taken = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for follower in followers:
            for _ in follower.masks(text, drafts):
                pass
        taken.append(time.perf_counter() - started)
    return 1e6 * statistics.median(taken[1:])


def main(json_: Annotated[Path | None, typer.Option("--json", help="Where to write the figures.")] = None) -> None:
    """Print both tables."""
    console = Console()
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as processes:
        compiled = dict(zip(GUIDES, processes.map(compile_one, GUIDES), strict=True))
    table = Table("guide", "CPU ms", "MiB")
    for name, found in compiled.items():
        table.add_row(name, f"{found['ms']:.1f}", f"{found['mib']:.1f}")
    console.print(table)
    tokenizer = AutoTokenizer.from_pretrained(fetch_smollm2())
    sizes = [(rows, draft_len) for rows in (1, 8) for draft_len in (0, 7)]
    masks = {
        name: {f"{rows} rows, K={k}": mask_microseconds(make(tokenizer), rows, k) for rows, k in sizes}
        for name, make in GUIDES.items()
    }
    table = Table("masks of a step, us", *(f"{rows} rows, K={k}" for rows, k in sizes))
    for name, found in masks.items():
        table.add_row(name, *(f"{value:.0f}" for value in found.values()))
    console.print(table)
    if json_ is not None:
        json_.write_text(json.dumps({"machine": describe(), "compiled": compiled, "masks_us": masks}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

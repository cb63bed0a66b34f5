"""Memory of keys and values of several requests: one piece for each slot, and pages of a pool.

``python -m benchmarks.kv_memory``; see README.md beside this file.
"""

from __future__ import annotations

import json
import multiprocessing
import resource
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from speccompile import wrap
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.utils.model_names import SMOLLM2

#: ``requests`` of ``tokens`` each, of which the first ``shared`` are the same, over ``slots``.
LOADS = {
    "8 requests of 500 tokens": {"requests": 8, "tokens": 500, "shared": 0, "slots": 8},
    "16 requests with 2,000 tokens in common": {"requests": 16, "tokens": 2200, "shared": 2000, "slots": 16},
}
NEW_TOKENS = 150
MIB = 2**20


def resident() -> int:
    """Bytes of this process that are in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


def measure(model: str, kv: str, memory: str | None, max_len: int, work: dict[str, int]) -> dict[str, Any]:
    """Figures of one wrap in MiB, after the requests have ended."""
    with session():
        target, _ = load(model)
        generator = torch.Generator().manual_seed(0)
        options: dict[str, Any] = {"weights": "int4", "kv": kv, "kv_memory": memory, "max_len": max_len}
        with wrap(target, "none", tiers=(0,), max_batch=work["slots"], **options) as spec:
            before = resident()
            ids = torch.randint(1000, 49152, (work["requests"], work["tokens"] - NEW_TOKENS), generator=generator)
            ids[:, : work["shared"]] = ids[0, : work["shared"]]
            ends = {"max_new_tokens": NEW_TOKENS, "eos_token_id": []}
            # The first one is read before the others begin.
            first = spec.engine.submit(ids[0].tolist(), **ends)
            first.result()
            requests = [spec.engine.submit(row.tolist(), **ends) for row in ids]
            highest = 0
            while not all(request.finished for request in requests):
                spec.engine.step()
                use = spec.memory()
                highest = max(highest, use.running)
            pool = spec.arena.layout.paging is not None
            use = spec.memory()
            a_token = use.page_bytes / use.page_tokens
            exist = work["shared"] + work["requests"] * (work["tokens"] - work["shared"])
            return {
                "KV in all": use.nbytes / MIB,
                "held while all run": highest * use.page_bytes / MIB,
                "tokens that exist": exist * a_token / MIB,
                "resident, more than after the wrap": (resident() - before) / MIB,
                "pages": pool,
            }


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = SMOLLM2,
    kv: Annotated[str, typer.Option(help="The form of keys and values.")] = "same",
    pool: Annotated[str, typer.Option(help="kv_memory of the wraps with pages.")] = "1GiB",
    max_len: Annotated[int, typer.Option(min=1, help="Of all wraps.")] = 8192,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Serve requests with KV in pieces and in pages, each in a new process."""
    found: dict[str, dict[str, Any]] = {}
    shown = Table(title="MiB", title_justify="left")
    for heading in ("requests", "kv_memory", "KV in all", "held while all run", "tokens that exist", "resident, more"):
        shown.add_column(heading, justify="right")
    for name, work in LOADS.items():
        for memory in (None, pool):
            with multiprocessing.get_context("spawn").Pool(1) as process:
                figures = process.apply(measure, (model, kv, memory, max_len, work))
            found[f"{name}, kv_memory={memory}"] = figures
            shown.add_row(name, str(memory), *(f"{value:.0f}" for value in list(figures.values())[:-1]))
    Console(width=120).print(shown)
    if json_file is not None:
        settings = {"model": model, "kv": kv, "pool": pool, "max_len": max_len, "new_tokens": NEW_TOKENS}
        json_file.write_text(json.dumps({"machine": describe(), "settings": settings, "MiB": found}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

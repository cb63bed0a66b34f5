"""What does one step cost: next to reading the weights once, by width, by context, by the size of the cache?

``python -m benchmarks.steps``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.machine import describe
from benchmarks.read_bandwidth import ReadBuffer
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.utils.progress import task

PIPED_WIDTH = 120
SHORT, LONG = 200, 1500
SMALL_CACHE, LARGE_CACHE = 256, 2048
PROMPT = 600
#: Of rounded weights.
ROUNDED = (torch.int8, torch.uint8)

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    """``of`` takes so many times as long as ``to``."""

    what: str
    of: str
    to: str


def place(spec: Speculator, context: int) -> None:
    """One live row whose text has ``context`` tokens."""
    arena = spec.arena
    arena["length"].fill_(context)
    arena["limit"].fill_(arena.layout.max_len)
    arena["alive"].fill_(True)
    arena["slots"].zero_()


def step(spec: Speculator, draft_len: int, context: int) -> Work:
    """A step of that tier over one row, its place restored before it. As the weights, the faster of two: a step
    usually follows a step, and not a pass over something else.
    """
    tier = spec.engine.tiers[draft_len, 1, "greedy"]

    def prepare_and_run() -> float:
        place(spec, context)
        return seconds(tier.run)

    return lambda: min(prepare_and_run() for _ in range(2))


def seconds(work: Work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def weight_bytes(spec: Speculator) -> int:
    """Bytes of everything that a step reads of the weights; of a table that only gives a token's row nothing."""
    tier = spec.tiers[0]
    tables = {
        node.name
        for node in tier.graph.placeholders
        if node.users and all("embedding" in str(user.target) for user in node.users)
    }
    weights = {
        tensor.data_ptr(): tensor
        for name, tensor in zip(tier.argument_names, tier.arguments, strict=True)
        if name not in spec.arena and name not in tables and (tensor.is_floating_point() or tensor.dtype in ROUNDED)
    }
    return sum(tensor.nbytes for tensor in weights.values())


def read_once(spec: Speculator) -> Work:
    """Read as many bytes as a step reads of the weights, by a loop in C++: no step is faster. The faster of two counts,
    as of a step."""
    buffer = ReadBuffer(weight_bytes(spec))
    return lambda: min(buffer.seconds() for _ in range(2))


def prefill(spec: Speculator, ids: torch.Tensor) -> Work:
    return lambda: seconds(lambda: spec.generate(ids, max_new_tokens=1))


def transformers_prefill(model: PreTrainedModel, ids: torch.Tensor) -> Work:
    mask = torch.ones_like(ids)
    return lambda: seconds(lambda: model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False))


def interleaved(works: Mapping[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of each; they take turns, and who begins rotates. The first round is not counted."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(repeats + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            spent = works[name]()
            assert isinstance(spent, float)
            if turn:
                taken[name].append(spent)
    return taken


def compare(
    model: PreTrainedModel, large: Speculator, small: Speculator, repeats: int, unrounded: Speculator | None = None
) -> dict[str, Any]:
    """``unrounded`` reads the model's own weights, where the others read rounded ones."""
    draft_len = max(large.engine.draft_lens)
    narrow, wide = "K=0", f"K={draft_len}"
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(1, large.arena.layout.vocab_size, (1, PROMPT), generator=generator)
    works: dict[str, Work] = {
        "weights": read_once(large),
        f"{narrow}, context {SHORT}": step(large, 0, SHORT),
        f"{wide}, context {SHORT}": step(large, draft_len, SHORT),
        f"{narrow}, context {SHORT}, max_len {SMALL_CACHE}": step(small, 0, SHORT),
        f"{narrow}, context {LONG}": step(large, 0, LONG),
    }
    if unrounded is not None:
        works[f"{narrow}, context {SHORT}, unrounded"] = step(unrounded, 0, SHORT)
    taken = interleaved(works, repeats)
    prompts = {"prompt": prefill(large, ids), "prompt, transformers": transformers_prefill(model, ids)}
    taken |= interleaved(prompts, max(3, repeats // 8))
    wanted = [
        Ratio("a K=0 step, to reading the weights once", f"{narrow}, context {SHORT}", "weights"),
        Ratio(f"T={draft_len + 1} to T=1", f"{wide}, context {SHORT}", f"{narrow}, context {SHORT}"),
        Ratio(
            f"max_len {LARGE_CACHE} to {SMALL_CACHE}",
            f"{narrow}, context {SHORT}",
            f"{narrow}, context {SHORT}, max_len {SMALL_CACHE}",
        ),
        Ratio(f"context {LONG} to {SHORT}", f"{narrow}, context {LONG}", f"{narrow}, context {SHORT}"),
        Ratio(f"a prompt of {PROMPT} tokens, to transformers'", "prompt", "prompt, transformers"),
    ]
    if unrounded is not None:
        wanted.append(
            Ratio("unrounded weights to rounded", f"{narrow}, context {SHORT}, unrounded", f"{narrow}, context {SHORT}")
        )
    return figures(taken, wanted)


def figures(taken: Mapping[str, Sequence[float]], wanted: Sequence[Ratio]) -> dict[str, Any]:
    """``milliseconds`` and ``ratios``, the median and the least of each, of the seconds that were taken."""
    median = {name: statistics.median(values) for name, values in taken.items()}
    least = {name: min(values) for name, values in taken.items()}
    return {
        "milliseconds": {name: {"median": 1e3 * median[name], "least": 1e3 * least[name]} for name in taken},
        "ratios": {
            ratio.what: {"median": median[ratio.of] / median[ratio.to], "least": least[ratio.of] / least[ratio.to]}
            for ratio in wanted
        },
    }


def tables(report: dict[str, Any]) -> list[Table]:
    found = []
    for title, unit, cell in (("milliseconds", "ms", "{:.1f}"), ("ratios", "", "{:.2f}x")):
        table = Table(title=f"{title}, interleaved", title_justify="left")
        for heading in ("", f"median {unit}".strip(), f"least {unit}".strip()):
            table.add_column(heading, justify="left" if not heading else "right")
        for name, values in report[title].items():
            table.add_row(name, cell.format(values["median"]), cell.format(values["least"]))
        found.append(table)
    return found


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    mode: Annotated[str, typer.Option(help="How to draft.")] = "ngram",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,7",
    weights: Annotated[
        str, typer.Option(help="same, int8 or int4, which then is timed beside the model's own.")
    ] = "same",
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 40,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time single steps, in turns."""
    if quick:
        repeats = 2
    with session():
        draft_lens = parse_tiers(tiers)
        target, _ = load(model)
        options: dict[str, Any] = {"tiers": draft_lens, "backend": backend, "weights": weights}
        with contextlib.ExitStack() as stack:
            large = stack.enter_context(wrap(target, mode, max_len=LARGE_CACHE, prefix_reuse=False, **options))
            small = stack.enter_context(wrap(target, mode, max_len=SMALL_CACHE, **options))
            unrounded = None
            if weights != "same":
                options["weights"] = "same"
                unrounded = stack.enter_context(wrap(target, mode, max_len=LARGE_CACHE, **options))
            with task("step by step"):
                report = compare(target, large, small, repeats, unrounded)
            kernels = large.explain().partition("kernels")[2].partition("\n")[0].strip()
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(report):
            console.print(table)
        console.print(f"kernels: {kernels}")
        if json_file is not None:
            settings = {"model": model, "mode": mode, "tiers": draft_lens, "repeats": repeats, "kernels": kernels}
            settings["weights"] = weights
            json_file.write_text(json.dumps({"machine": describe(), "settings": settings, **report}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

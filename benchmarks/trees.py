"""Trees beside chains of as many draft tokens, over the same prompts, by category; and what a step of each takes.

``python -m benchmarks.trees --prompts FILE --mode suffix --nodes 8``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.adaptive import Continued
from benchmarks.drafters import NONE, PIPED_WIDTH, Way, report, show, warm_up
from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from benchmarks.steps import interleaved, seconds, step
from speccompile import Speculator, Tree, wrap
from speccompile.cli.measure import measure
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import session
from speccompile.passes.step.move_path import KV
from speccompile.policies import Cost, Fixed

CHAIN = "chain"
#: Tokens of the sequence in the steps that are timed; accepted draft tokens whose KV is moved.
CONTEXT, ACCEPTED = 200, 4


def step_times(spec: Speculator, shapes: Mapping[str, int], repeats: int) -> dict[str, Any]:
    """Milliseconds of a step of one row, by shape, and of moving the KV of a path of :data:`ACCEPTED` draft tokens, of
    which none is where a chain would have left it."""
    arena, generator = spec.arena, torch.Generator().manual_seed(0)
    context = min(CONTEXT, arena.layout.max_len // 2)
    arena["tokens"].copy_(torch.randint(1, arena.layout.vocab_size, arena["tokens"].shape, generator=generator))
    taken = interleaved({name: step(spec, shape, context) for name, shape in shapes.items()}, repeats)
    medians = {name: 1e3 * statistics.median(own) for name, own in taken.items()}
    tree = max(shape for shape in shapes.values() if isinstance(shape, Tree))
    # The op of the step itself.
    nodes = spec.engine.tiers[tree, 1, "greedy"].graph.graph.nodes
    move = next(node.target for node in nodes if "move_path_" in str(node.target))
    kv = [arena[name] for name in arena.layout.tensors if KV.fullmatch(name)]
    slots, root = torch.tensor([0]), torch.tensor([context - 1])
    accepted = min(ACCEPTED, int(tree) // 2)
    path = 2 * torch.arange(accepted + 1)[None]
    moves = [seconds(lambda: move(kv, slots, root, path, torch.tensor([accepted]))) for _ in range(10 * repeats)]
    moving = 1e3 * statistics.median(moves)
    return {
        "context": context,
        "step_ms": medians,
        "over_chain": {name: ms / medians[CHAIN] for name, ms in medians.items()},
        "moved_drafts": accepted,
        "move_ms": moving,
        "move_share": moving / min(ms for name, ms in medians.items() if name != NONE),
    }


def step_table(times: Mapping[str, Any]) -> Table:
    table = Table(title=f"a step after {times['context']} tokens, median ms", title_justify="left")
    for heading in ("", "ms", f"over {CHAIN}"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, ms in times["step_ms"].items():
        table.add_row(name, f"{ms:.2f}", f"{times['over_chain'][name]:.3f}")
    moved = f"KV of a path of {times['moved_drafts']}"
    table.add_row(moved, f"{times['move_ms']:.3f}", f"{100 * times['move_share']:.2f} % of a step")
    return table


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    mode: Annotated[str, typer.Option(help="One that drafts trees; with commas several, composed.")] = "suffix",
    draft: Annotated[str | None, typer.Option(help="Of such a mode with a head, the head's folder.")] = None,
    nodes: Annotated[int, typer.Option(min=2, help="Draft tokens of chain and trees.")] = 8,
    depth: Annotated[int | None, typer.Option(min=1, help="Of the trees; by default --nodes, less of heads.")] = None,
    short: Annotated[int | None, typer.Option(min=1, help="Draft tokens of a second chain.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    repeats: Annotated[int, typer.Option(min=1, help="Rounds in which steps are timed.")] = 15,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare K=0, a chain, trees of as many tokens with more and more branches, and `cost` over all of them."""
    with session():
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        ids = [torch.tensor([own], device=target.device) for _, own in fitting]
        # Each level is a forward of a head. A lookup proposes whatever is likeliest, and what does not fit is lost.
        branches = (2, 3, 4) if draft else sorted({2, 4, nodes})
        deepest = {b: depth or (max(2, nodes // (b - 1)) if draft else nodes) for b in branches}
        shapes = {f"tree, {b} branches": Tree.dynamic(nodes, deepest[b], b) for b in branches}
        chains = {CHAIN: nodes} | ({} if short is None else {f"{CHAIN} of {short}": short})
        tiers = (0, *sorted(chains.values()), *shapes.values())
        options: dict[str, Any] = {} if draft is None else {"draft": draft}
        options |= {"tiers": tiers, "max_len": max_len, "backend": backend, "prefix_reuse": False}
        drafters = mode.split(",")
        with wrap(target, drafters if len(drafters) > 1 else mode, **options) as spec:
            names: dict[str, int] = {NONE: 0, **chains, **shapes}
            ways = [Way(name, spec, Fixed(shape), Counter()) for name, shape in names.items()]
            ways.append(Way("cost", spec, Continued(Cost()), Counter()))
            for way in ways:
                warm_up(way, ids[0])
            variants = [way.variant(0.0) for way in ways]
            with count_runs("Decoding, prompt by prompt", len(variants) * (len(ids) + 1)) as after_run:
                runs = measure(variants, ids, new_tokens, after_run)
            times = step_times(spec, names, repeats)
        result = report(ways, runs, [prompt.category for prompt, _ in fitting], (NONE, CHAIN))
        different = show(result, target, ids, runs)
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(step_table(times))
        if json_file is not None:
            settings: dict[str, Any] = {"model": model, "mode": mode, "draft": draft, "prompts": name_of(prompts)}
            settings |= {"nodes": nodes, "depth": depth, "short": short, "count": len(ids)}
            settings |= {"new_tokens": new_tokens, "max_len": max_len}
            whole = {"machine": describe(), "settings": settings, "different_texts": different, **result}
            whole["steps"] = times
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

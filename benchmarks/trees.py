"""Trees beside chains of as many draft tokens, over the same prompts, by category.

``python -m benchmarks.trees --prompts FILE --mode suffix --nodes 8``; see README.md beside this file.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.adaptive import Continued
from benchmarks.drafters import NONE, Way, report, show, warm_up
from benchmarks.machine import describe
from benchmarks.serving import fitting_prompts
from speccompile import Tree, wrap
from speccompile.cli.measure import measure
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import session
from speccompile.policies import Cost, Fixed

CHAIN = "chain"


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    mode: Annotated[str, typer.Option(help="A mode that drafts trees.")] = "suffix",
    draft: Annotated[str | None, typer.Option(help="Of such a mode with a head, the head's folder.")] = None,
    nodes: Annotated[int, typer.Option(min=2, help="Draft tokens of chain and trees.")] = 8,
    depth: Annotated[int | None, typer.Option(min=1, help="Of the trees; by default as deep as fits.")] = None,
    short: Annotated[int | None, typer.Option(min=1, help="Draft tokens of a second chain.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare K=0, a chain, trees of as many tokens (two, three and four branches), and `cost` over all of them."""
    with session():
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        ids = [torch.tensor([own], device=target.device) for _, own in fitting]
        shapes = {f"tree, {b} branches": Tree.dynamic(nodes, depth or max(2, nodes // (b - 1)), b) for b in (2, 3, 4)}
        chains = {CHAIN: nodes} | ({} if short is None else {f"{CHAIN} of {short}": short})
        tiers = (0, *sorted(chains.values()), *shapes.values())
        options: dict[str, Any] = {} if draft is None else {"draft": draft}
        options |= {"tiers": tiers, "max_len": max_len, "backend": backend, "prefix_reuse": False}
        with wrap(target, mode, **options) as spec:
            names: dict[str, int] = {NONE: 0, **chains, **shapes}
            ways = [Way(name, spec, Fixed(shape), Counter()) for name, shape in names.items()]
            ways.append(Way("cost", spec, Continued(Cost()), Counter()))
            for way in ways:
                warm_up(way, ids[0])
            variants = [way.variant(0.0) for way in ways]
            with count_runs("Decoding, prompt by prompt", len(variants) * (len(ids) + 1)) as after_run:
                runs = measure(variants, ids, new_tokens, after_run)
        result = report(ways, runs, [prompt.category for prompt, _ in fitting], (NONE, CHAIN))
        different = show(result, target, ids, runs)
        if json_file is not None:
            settings: dict[str, Any] = {"model": model, "mode": mode, "draft": draft, "prompts": str(prompts)}
            settings |= {"nodes": nodes, "depth": depth, "short": short, "count": len(ids)}
            settings |= {"new_tokens": new_tokens, "max_len": max_len}
            whole = {"machine": describe(), "settings": settings, "different_texts": different, **result}
            json_file.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

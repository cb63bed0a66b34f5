"""How much of a recorded text would lookups have had accepted, as chains and as trees? No step is timed.

``python -m benchmarks.lookups --prompts FILE``; see README.md beside this file.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.drafters import PIPED_WIDTH, groups
from benchmarks.prompts import name_of
from benchmarks.serving import fitting_prompts
from speccompile import Speculator, Tree, wrap
from speccompile.cli.models import load
from speccompile.cli.progress import count_runs
from speccompile.cli.session import session
from speccompile.graph.arena import Arena
from speccompile.graph.state import resolve_layout
from speccompile.modes import ReadyMode, create
from speccompile.passes.step.tree_drafts import fit

#: Prompts that are decoded together.
BATCH = 4


@dataclass(frozen=True)
class Recorded:
    """A prompt and the model's greedy answer, as token ids."""

    category: str
    prompt: list[int]
    answer: list[int]


def record(spec: Speculator, prompts: Sequence[tuple[str, list[int]]], new_tokens: int) -> list[Recorded]:
    texts = []
    # So many at a time as run together: the engine's queue is bounded.
    for start in range(0, len(prompts), BATCH):
        some = prompts[start : start + BATCH]
        requests = [spec.engine.submit(ids, max_new_tokens=new_tokens, do_sample=False) for _, ids in some]
        answers = [request.result().token_ids for request in requests]
        texts += [Recorded(category, ids, answer) for (category, ids), answer in zip(some, answers, strict=True)]
    return texts


def replay(mode: ReadyMode, shape: int, text: Recorded, vocab_size: int) -> int:
    """Steps in which the answer would have been decoded, after its first token, with drafts of that shape."""
    ids = [*text.prompt, *text.answer]
    sizes: dict[str, Any] = {"max_batch": 1, "max_draft_len": int(shape), "max_width": int(shape) + 1}
    layout = resolve_layout(mode.state((shape,)), max_len=len(ids), vocab_size=vocab_size, **sizes)
    arena = Arena(layout, torch.device("cpu"))
    tokens = torch.zeros((1, arena.layout.cache_len), dtype=torch.int64)
    tokens[0, : len(ids)] = torch.tensor(ids)
    own = [torch.zeros(1, dtype=torch.int64), *[arena[name] for name in mode.own_state]] if mode.own_state else []
    length, steps = len(text.prompt) + 1, 0
    while length < len(ids):
        now = torch.tensor([length])
        drafts, count, *_ = mode.propose(tokens, now, *own, draft_len=int(shape))
        parents = torch.arange(int(shape))[None]
        if isinstance(shape, Tree):
            proposal = mode.propose_tree(tokens, now, *own, nodes=int(shape))
            drafts, parents, _, count = fit(shape, *proposal, torch.full_like(now, int(shape)))
            parents = parents[:, 1:]
        nodes = list(zip(parents[0].tolist(), drafts[0].tolist(), strict=True))
        if not isinstance(shape, Tree):
            nodes = nodes[: int(count)]
        length += accepted(nodes, ids[length:-1]) + 1
        steps += 1
    return steps


def accepted(nodes: Sequence[tuple[int, int]], following: Sequence[int]) -> int:
    """How many tokens of ``following`` are on a path of ``nodes``, each with its parent (0 is the root) and token."""
    now = count = 0
    for token in following:
        if (now, token) not in nodes:
            break
        now = nodes.index((now, token)) + 1
        count += 1
    return count


def figures(texts: Sequence[Recorded], ways: dict[str, tuple[ReadyMode, int]], vocab_size: int) -> list[dict[str, Any]]:
    """Acceptance length of each way, by category."""
    steps: dict[str, list[int]] = {name: [] for name in ways}
    with count_runs("Replaying", len(ways) * len(texts)) as after_run:
        for name, (mode, shape) in ways.items():
            for text in texts:
                steps[name].append(replay(mode, shape, text, vocab_size))
                after_run()
    rows = []
    for group in groups([text.category for text in texts]):
        emitted = sum(len(texts[index].answer) - 1 for index in group.indices)
        lengths = {name: emitted / sum(own[index] for index in group.indices) for name, own in steps.items()}
        rows.append({"category": group.name, "prompts": len(group.indices), "acceptance_length": lengths})
    return rows


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 128,
    mode: Annotated[list[str] | None, typer.Option(help="A ready drafter; may repeat.")] = None,
    nodes: Annotated[list[int] | None, typer.Option(help="Draft tokens of chain and tree; may repeat.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Record greedy answers, and replay drafters over them."""
    with session():
        target, tokenizer = load(model)
        fitting = fitting_prompts(tokenizer, prompts, count, max_len - new_tokens)
        with wrap(target, "ngram", tiers=(0, 3), max_batch=BATCH, max_len=max_len, backend=backend) as spec:
            texts = record(spec, [(prompt.category, ids) for prompt, ids in fitting], new_tokens)
            vocab_size = spec.arena.layout.vocab_size
        ways: dict[str, tuple[ReadyMode, int]] = {}
        for name in mode or ("suffix", "ngram"):
            drafter = create(name, {})
            assert isinstance(drafter, ReadyMode)
            for size in nodes or (8, 16):
                ways[f"{name}, chain of {size}"] = (drafter, size)
                ways[f"{name}, tree of {size}"] = (drafter, Tree.dynamic(size, size, size))
        rows = figures(texts, ways, vocab_size)
        table = Table(title="acceptance length", title_justify="left")
        for heading in ("", "prompts", *ways):
            table.add_column(heading, justify="right" if heading else "left")
        for row in rows:
            lengths = [f"{value:.2f}" for value in row["acceptance_length"].values()]
            table.add_row(row["category"], str(row["prompts"]), *lengths)
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "count": len(texts), "new_tokens": new_tokens}
            json_file.write_text(json.dumps({"settings": settings, "categories": rows}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

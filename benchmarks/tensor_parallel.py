"""What does a step cost over several processes, which part of it is communication, and what does the paper say?

``torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel``, and ``python -m benchmarks.tensor_parallel`` for one
process; see README.md beside this file.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch.distributed.tensor import DTensor

import speccompile
from benchmarks.machine import describe
from speccompile import Speculator, pretrained
from speccompile.ops import collective
from speccompile.runtime.measure import dummy_rows
from speccompile.tools.rank_costs import RankSpeeds, ShardedModel, fitted, step_seconds

CONTEXT = 200
WARM_UP = 5


class Waiting:
    """Seconds that this process spends in collectives and messages, which include waiting for the other ranks."""

    def __init__(self) -> None:
        self.collectives = self.messages = 0.0

    def count(self, owner: Any, function: str, field: str) -> None:
        """Time all calls of a function from now on."""
        original = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                setattr(self, field, getattr(self, field) + time.perf_counter() - started)

        setattr(owner, function, timed)


def measure(spec: Speculator, waiting: Waiting, steps: int) -> dict[str, Any]:
    """Median milliseconds of a step of each tier over one row, and the mean parts of it."""
    found = {}
    with dummy_rows(spec.arena, CONTEXT):
        for draft_len in spec.engine.draft_lens:
            tier = spec.engine.tiers[draft_len, 1, "greedy"]
            for _ in range(WARM_UP):
                tier.run()
            waiting.collectives = waiting.messages = 0.0
            taken = []
            for _ in range(steps):
                started = time.perf_counter()
                tier.run()
                taken.append(1e3 * (time.perf_counter() - started))
            calls = spec.collectives(draft_len)
            found[str(draft_len)] = {
                "milliseconds": statistics.median(taken),
                "collectives_ms": 1e3 * waiting.collectives / steps,
                "share": 1e3 * waiting.collectives / sum(taken),
                "message_ms": 1e3 * waiting.messages / steps,
                "calls": sum(call.calls for call in calls),
                "kib": sum(call.nbytes for call in calls) / 2**10,
            }
    return found


def on_paper(model: Any) -> ShardedModel:
    """What a step of ``model`` reads on all ranks together, and on each."""
    config, text = model.config, model.config.get_text_config(decoder=True)
    weights = whole = 0
    attention_sums = False
    for name, weight in model.named_parameters():
        if isinstance(weight, DTensor):
            weights += weight.numel() * weight.element_size()
            attention_sums |= name.endswith("o_proj.weight")
        elif "embed_tokens" not in name or config.tie_word_embeddings:
            whole += weight.numel() * weight.element_size()
    itemsize = model.dtype.itemsize
    return ShardedModel(weights, whole, text.num_hidden_layers, text.hidden_size, itemsize, 1 + attention_sums)


def collective_seconds(group: str, ranks: int, hidden: int, calls: int = 200) -> dict[int, float]:
    """Median seconds of an all-reduce of nothing but that, by the bytes that a rank receives. All ranks call it."""
    found = {}
    for width in (1, 4, 16, 64):
        x, taken = torch.ones(1, width, hidden), []
        for _ in range(calls):
            started = time.perf_counter()
            collective.all_reduce(x, group, ranks)
            taken.append(time.perf_counter() - started)
        found[(ranks - 1) * x.nbytes] = statistics.median(taken)
    return found


def step_times(path: Path) -> dict[int, float]:
    """Seconds of a step by width, of a file that ``--json`` wrote."""
    tiers = json.loads(path.read_text())["tiers"]
    return {int(size) + 1: tier["milliseconds"] / 1e3 for size, tier in tiers.items()}


def add_paper(tiers: dict[str, Any], model: ShardedModel, machine: RankSpeeds, ranks: int) -> None:
    """The milliseconds of each tier by :mod:`speccompile.tools.rank_costs`, beside the measured ones."""
    for draft_len, tier in tiers.items():
        tier["paper_ms"] = 1e3 * step_seconds(model, machine, ranks=ranks, width=int(draft_len) + 1)


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub id.")] = "smollm2",
    steps: Annotated[int, typer.Option(help="Timed steps of each tier.")] = 40,
    threads: Annotated[int, typer.Option(help="Threads of all ranks together.")] = 2,
    one: Annotated[
        Path | None, typer.Option(help="What one process with the threads of one rank wrote (--json): for paper_ms.")
    ] = None,
    shared: Annotated[
        Path | None,
        typer.Option(
            help="What one process with the threads of all ranks wrote: they share the memory of one machine."
        ),
    ] = None,
    json_path: Annotated[Path | None, typer.Option("--json", help="Also write the figures to this file.")] = None,
) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, threads // ranks))
    target = pretrained.load_model(model, ranks=ranks)
    sizes = on_paper(target)
    spec = speccompile.wrap(target, mode="ngram", tiers=(0, 1, 3, 7), max_len=512)
    waiting, group = Waiting(), spec.engine.ranks
    alone = {} if group is None else collective_seconds(group.name, ranks, sizes.hidden)
    waiting.count(collective, "_gathered", "collectives")
    if group is not None:
        waiting.count(group._channel, "send", "messages")
    if spec.rank:
        spec.follow()
        return
    with spec:
        tiers = measure(spec, waiting, steps)
    result: dict[str, Any] = {"ranks": ranks, "threads": threads, **describe(), "tiers": tiers}
    if one is not None:
        machine = fitted(sizes, step_times(one), alone, ring=False)
        if shared is not None:
            together = fitted(sizes, step_times(shared), alone, ring=False)
            machine = replace(machine, read=min(machine.read, together.read / ranks))
        add_paper(tiers, sizes, machine, ranks)
        result["machine"] = asdict(machine)
        result["model"] = asdict(sizes)
    text = json.dumps(result, indent=1)
    print(text)
    if json_path is not None:
        json_path.write_text(text + "\n")


if __name__ == "__main__":
    typer.run(main)

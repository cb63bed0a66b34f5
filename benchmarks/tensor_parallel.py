"""What does a step cost over several processes, and which part of it is communication?

``torchrun --nproc-per-node 2 -m benchmarks.tensor_parallel``, and ``python -m benchmarks.tensor_parallel`` for one
process; see README.md beside this file.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from typing import Annotated, Any

import torch
import typer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.distributed import DistributedConfig

import speccompile
from benchmarks.machine import describe
from speccompile import Speculator, pretrained
from speccompile.ops import collective
from speccompile.runtime.measure import dummy_rows

CONTEXT = 200
WARM_UP = 5


def load(name: str, ranks: int) -> Any:
    """The model, sharded where there are several ranks. Attention stays whole where KV heads cannot be shared out."""
    if ranks == 1:
        return AutoModelForCausalLM.from_pretrained(name).eval()
    whole = AutoConfig.from_pretrained(name).num_key_value_heads % ranks
    plan = {f"model.layers.*.self_attn.{part}_proj": "replicate" for part in "qkvo"} if whole else None
    config = DistributedConfig(tp_size=ranks, tp_plan=plan)
    return AutoModelForCausalLM.from_pretrained(name, distributed_config=config).eval()


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
                "message_ms": 1e3 * waiting.messages / steps,
                "calls": sum(call.calls for call in calls),
                "kib": sum(call.nbytes for call in calls) / 2**10,
            }
    return found


def main(
    model: Annotated[str, typer.Option(help="A folder or a hub id; SmolLM2-135M-Instruct if left out.")] = "",
    steps: Annotated[int, typer.Option(help="Timed steps of each tier.")] = 40,
    threads: Annotated[int, typer.Option(help="Threads of all ranks together.")] = 2,
) -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(max(1, threads // ranks))
    name = model or str(pretrained.fetch_smollm2())
    spec = speccompile.wrap(load(name, ranks), mode="ngram", tiers=(0, 1, 3, 7), max_len=512)
    waiting = Waiting()
    waiting.count(collective, "_gathered", "collectives")
    if spec.engine.ranks is not None:
        waiting.count(spec.engine.ranks._channel, "send", "messages")
    if spec.rank:
        spec.follow()
        return
    with spec:
        result = {"ranks": ranks, "threads": threads, **describe(), "tiers": measure(spec, waiting, steps)}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    typer.run(main)

"""Whole decode loops beside ours: transformers' and one written by hand."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from transformers import CompileConfig, LlamaForCausalLM

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.by_hand import ByHand
from benchmarks.gpu.rates import RATE
from benchmarks.gpu.timing import seconds_of
from speccompile import Speculator

#: Makes so many new tokens.
Run = Callable[[int], object]


@dataclass(frozen=True)
class Runs:
    """By name: those that make a token a step, and those whose steps make as many as drafts are accepted."""

    baseline: dict[str, Run]
    drafting: dict[str, Run]


@dataclass(frozen=True)
class Loop:
    """``lengths`` are the two that it is measured by."""

    run: Run
    lengths: tuple[int, int]


def measure_loops(
    spec: Speculator,
    model: LlamaForCausalLM,
    figures: Figures,
    *,
    rows: int,
    draft_len: int,
    rate: float,
    new_tokens: tuple[int, int],
    drafted_tokens: tuple[int, int],
    rounds: int,
    compiled: dict[str, Any],
) -> None:
    """Seconds a new token of each, by the difference of two lengths, so that prompts do not count. All take turns, and
    what each round found is kept. ``drafted_tokens`` are the lengths of the loop with drafts: those of every round are
    accepted alike, so that only a long text has nearly so many as ``rate`` says."""
    device = model.device
    prompt = torch.randint(1, model.config.vocab_size, (rows, 32), generator=torch.Generator().manual_seed(1))
    ids = prompt.to(device)
    runs = make_loops(spec, model, ids, draft_len=draft_len, rate=rate, compiled=compiled)
    loops = {name: Loop(run, new_tokens) for name, run in runs.baseline.items()}
    loops |= {name: Loop(run, drafted_tokens) for name, run in runs.drafting.items()}
    figures["rows"], figures["warm_up_seconds"] = rows, {}
    for name, loop in loops.items():
        started = time.perf_counter()
        # What is compiled settles in the second call.
        for count in (loop.lengths[1], *loop.lengths):
            loop.run(count)
        figures["warm_up_seconds"][name] = time.perf_counter() - started
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(rounds):
        for name, loop in loops.items():
            short, long = (seconds_of(partial(loop.run, count), device) for count in loop.lengths)
            taken[name].append(1e3 * (long - short) / (loop.lengths[1] - loop.lengths[0]))
        figures["loops"] = [
            {"loop": name, "milliseconds_per_token": statistics.median(values)} for name, values in taken.items()
        ]


def make_loops(
    spec: Speculator,
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    *,
    draft_len: int,
    rate: float,
    compiled: dict[str, Any],
) -> Runs:
    mask = torch.ones_like(ids)
    common: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static", "compile_config": CompileConfig(**compiled)}
    by_hand = ByHand(model, ids.shape[0], spec.arena.layout.max_len, **compiled)

    def ours(tier: int) -> Run:
        def loop(count: int) -> object:
            spec.arena[RATE].fill_(rate)
            spec.set_tier(tier)
            return spec.generate(ids, mask, max_new_tokens=count, pad_token_id=0)

        return loop

    baseline: dict[str, Run] = {
        "transformers": lambda count: model.generate(ids, max_new_tokens=count, **common),
        "transformers, static cache + compile": lambda count: model.generate(
            ids, max_new_tokens=count, **common, **static
        ),
        "compiled loop by hand": lambda count: by_hand.generate(ids, count),
        "speccompile K=0": ours(0),
    }
    return Runs(baseline, {f"speccompile K={draft_len}, {rate:g} of drafts accepted": ours(draft_len)})

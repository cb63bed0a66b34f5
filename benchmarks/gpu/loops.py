"""Whole decode loops beside ours: transformers' and one written by hand."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import CompileConfig, LlamaForCausalLM

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.by_hand import ByHand
from benchmarks.gpu.rates import RATE
from benchmarks.gpu.timing import interleaved
from speccompile import Speculator

#: A loop of so many new tokens.
Loop = Callable[[int], object]


def measure_loops(
    spec: Speculator,
    model: LlamaForCausalLM,
    figures: Figures,
    *,
    rows: int,
    draft_len: int,
    rate: float,
    new_tokens: tuple[int, int],
    rounds: int,
    compiled: dict[str, Any],
) -> None:
    """Seconds a new token of each, by the difference of two lengths, so that prompts do not count. All take turns."""
    device = model.device
    prompt = torch.randint(1, model.config.vocab_size, (rows, 32), generator=torch.Generator().manual_seed(1))
    ids = prompt.to(device)
    loops = make_loops(spec, model, ids, draft_len=draft_len, rate=rate, compiled=compiled)
    figures["rows"], figures["warm_up_seconds"] = rows, {}
    warm: dict[str, Loop] = {}
    for name, loop in loops.items():
        started = time.perf_counter()
        # What is compiled settles in the second call.
        for count in (new_tokens[1], *new_tokens):
            loop(count)
        figures["warm_up_seconds"][name] = time.perf_counter() - started
        warm[name] = loop
    works = {
        f"{name} {count}": lambda loop=loop, count=count: loop(count)
        for name, loop in warm.items()
        for count in new_tokens
    }
    taken = interleaved(works, device, rounds)
    short, long = new_tokens
    figures["loops"] = [
        {
            "loop": name,
            "milliseconds_per_token": 1e3 * (taken[f"{name} {long}"] - taken[f"{name} {short}"]) / (long - short),
        }
        for name in warm
    ]


def make_loops(
    spec: Speculator,
    model: LlamaForCausalLM,
    ids: torch.Tensor,
    *,
    draft_len: int,
    rate: float,
    compiled: dict[str, Any],
) -> dict[str, Loop]:
    mask = torch.ones_like(ids)
    common: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "pad_token_id": 0}
    static = {"cache_implementation": "static", "compile_config": CompileConfig(**compiled)}
    by_hand = ByHand(model, ids.shape[0], spec.arena.layout.max_len, **compiled)

    def ours(tier: int) -> Loop:
        def loop(count: int) -> object:
            spec.arena[RATE].fill_(rate)
            spec.set_tier(tier)
            return spec.generate(ids, mask, max_new_tokens=count, pad_token_id=0)

        return loop

    return {
        "transformers": lambda count: model.generate(ids, max_new_tokens=count, **common),
        "transformers, static cache + compile": lambda count: model.generate(
            ids, max_new_tokens=count, **common, **static
        ),
        "compiled loop by hand": lambda count: by_hand.generate(ids, count),
        "speccompile K=0": ours(0),
        f"speccompile K={draft_len}, {rate:g} of drafts accepted": ours(draft_len),
    }

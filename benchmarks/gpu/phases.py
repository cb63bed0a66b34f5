"""Acceptance that is low, then high, then low: fixed tiers and the policy that adapts, over the same requests."""

from __future__ import annotations

import time
from typing import Any

import torch

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.rates import RATE
from benchmarks.gpu.timing import synchronize
from speccompile import Speculator
from speccompile.runtime.policy_controller import Fixed

#: Name and the rate at which a draft is accepted.
PHASES = (("low", 0.1), ("high", 0.95), ("low again", 0.1))


def measure_phases(
    spec: Speculator, figures: Figures, *, rows: int, tokens: int, prompt: int, policy: Any | None
) -> None:
    """Seconds that ``rows`` requests at a time take for so many new tokens in each phase.

    Args:
        policy: the adaptive one; None if there is none.
    """
    figures["rows"], figures["tokens_per_phase"], figures["runs"] = rows, tokens, []
    if policy is None:
        figures["adaptive"] = "not measured: this version has no policy that adapts"
    contenders: dict[str, Any] = {f"K={draft_len}": Fixed(draft_len) for draft_len in spec.engine.draft_lens}
    if policy is not None:
        contenders = {"adaptive": policy, **contenders}
    for name, chosen in contenders.items():
        spec.engine.policy = chosen
        run: dict[str, Any] = {"policy": name}
        # The first one is warm then, too.
        decode(spec, rows, tokens // 8, prompt)
        for phase, rate in PHASES:
            spec.arena[RATE].fill_(rate)
            run[phase] = decode(spec, rows, tokens, prompt)
        run["all"] = sum(run[phase] for phase, _ in PHASES)
        figures["runs"].append(run)
        adaptive, *fixed = figures["runs"]
        if policy is not None and fixed:
            # Kept as far as it came: what is cut short says so.
            figures["adaptive_to_best_fixed"] = min(run["all"] for run in fixed) / adaptive["all"]


def decode(spec: Speculator, rows: int, tokens: int, prompt: int) -> float:
    """Seconds until ``rows`` requests at a time have that many new tokens together; who ends is followed by another."""
    engine, layout = spec.engine, spec.arena.layout
    generator = torch.Generator().manual_seed(0)
    running: list[Any] = []
    done = 0
    synchronize(spec.arena.device)
    started = time.perf_counter()
    while done + sum(len(request.new_tokens) for request in running) < tokens:
        done += sum(len(request.new_tokens) for request in running if request.finished)
        running = [request for request in running if not request.finished]
        while len(running) < rows:
            ids = torch.randint(1, layout.vocab_size, (prompt,), generator=generator).tolist()
            running.append(engine.submit(ids, max_new_tokens=layout.max_len - prompt, eos_token_id=[]))
        engine.step()
    synchronize(spec.arena.device)
    seconds = time.perf_counter() - started
    for request in running:
        request.cancel()
    return seconds

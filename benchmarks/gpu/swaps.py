"""Swapping tiers: seconds and bytes of each swap, and what a step costs that follows one of another tier."""

from __future__ import annotations

import time

import torch

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.steps import clear, fill, place, tier_of
from benchmarks.gpu.timing import interleaved
from speccompile import Speculator


def allocated_bytes(device: torch.device) -> int | None:
    """All that torch ever handed out on the device; None where it does not count."""
    if device.type != "cuda":
        return None
    total: int = torch.cuda.memory_stats(device)["allocated_bytes.all.allocated"]
    return total


def measure_swaps(spec: Speculator, figures: Figures, *, count: int, rows: int, context: int, rounds: int) -> None:
    """``count`` swaps by ``set_tier``, round and round; then two tiers in turns next to each by itself."""
    device, draft_lens = spec.arena.device, spec.engine.draft_lens
    fingerprint = spec.arena.fingerprint()
    before = allocated_bytes(device)
    started = time.perf_counter()
    for index in range(count):
        spec.set_tier(draft_lens[index % len(draft_lens)])
    seconds = time.perf_counter() - started
    after = allocated_bytes(device)
    figures["swaps"] = count
    figures["microseconds_each"] = 1e6 * seconds / count
    figures["bytes_allocated"] = None if before is None or after is None else after - before
    figures["same_addresses"] = spec.arena.fingerprint() == fingerprint

    fill(spec)
    low, high = (tier_of(spec, draft_len, rows) for draft_len in (draft_lens[0], draft_lens[-1]))

    def turns() -> None:
        for _ in range(4):
            low.run()
            high.run()

    def apart() -> None:
        for tier in (low, high):
            for _ in range(4):
                tier.run()

    works = {"in turns": turns, "apart": apart}
    prepare = {name: lambda: place(spec, rows, context) for name in works}
    taken = interleaved(works, device, rounds, prepare)
    # Seven changes of tier in the one, one in the other.
    figures["microseconds_of_a_step_behind_another_tier"] = 1e6 * (taken["in turns"] - taken["apart"]) / 6
    clear(spec)

"""Kernels of one step by name: how often each is launched, and how long it runs."""

from __future__ import annotations

from collections import Counter

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.steps import clear, fill, place, tier_of
from benchmarks.gpu.timing import synchronize
from speccompile import Speculator

#: Kernels that are listed; the rest are one sum.
LISTED = 30
_REPLAYS = 4


def profile_steps(spec: Speculator, figures: Figures, *, draft_lens: tuple[int, ...], context: int) -> None:
    """By torch's profiler over a few steps of one row."""
    device = spec.arena.device
    figures["cases"] = cases = []
    if device.type != "cuda":
        figures["not measured"] = "a CPU runs no kernels of a GPU"
        return
    fill(spec)
    for draft_len in draft_lens:
        tier = tier_of(spec, draft_len, 1)
        place(spec, 1, context)
        tier.run()
        synchronize(device)
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            for _ in range(_REPLAYS):
                tier.run()
            synchronize(device)
        calls: Counter[str] = Counter()
        microseconds: Counter[str] = Counter()
        for event in found.events():
            if event.device_type == torch.autograd.DeviceType.CUDA:
                calls[event.name] += 1
                microseconds[event.name] += event.time_range.elapsed_us()
        listed = [
            {"kernel": name, "launches": calls[name] / _REPLAYS, "microseconds": total / _REPLAYS}
            for name, total in microseconds.most_common(LISTED)
        ]
        cases.append(
            {
                "K": draft_len,
                "launches": sum(calls.values()) / _REPLAYS,
                "microseconds": sum(microseconds.values()) / _REPLAYS,
                "kernels": listed,
            }
        )
    clear(spec)

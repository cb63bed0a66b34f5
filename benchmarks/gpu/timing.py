"""Seconds of work on a device, as the device sees them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

Work = Callable[[], object]


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(work: Work, device: torch.device) -> float:
    """From the beginning of the work to its end, events of its own around it; the device is idle before it."""
    synchronize(device)
    if device.type != "cuda":
        started = time.perf_counter()
        work()
        return time.perf_counter() - started
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def interleaved(
    works: Mapping[str, Work], device: torch.device, rounds: int, prepare: Mapping[str, Work] | None = None
) -> dict[str, float]:
    """Median seconds of each. They take turns, who begins rotates, and the first round is not counted.

    ``prepare``: what runs before each, untimed.
    """
    taken: dict[str, list[float]] = {name: [] for name in works}
    names = list(works)
    for turn in range(rounds + 1):
        start = turn % len(names)
        for name in names[start:] + names[:start]:
            if prepare is not None:
                prepare[name]()
            seconds = seconds_of(works[name], device)
            if turn:
                taken[name].append(seconds)
    return {name: statistics.median(values) for name, values in taken.items()}

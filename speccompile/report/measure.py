"""Measures steps: each tier as a whole, and its calls one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import torch

from speccompile.graph.arena import Arena
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.backends import Backend, Eager, load
from speccompile.lowering.tier import Tier
from speccompile.report.stopwatch import Laps, timing, with_laps
from speccompile.runtime.measure import dummy_rows
from speccompile.utils.devices import traits_of

#: Number of timed runs of a step as a whole, and of a step whose calls are timed.
RUNS, RUNS_IN_PARTS = 11, 4
#: Tokens of each row, unless a slot holds fewer.
CONTEXT = 256
#: Seconds of measurement after which a tier is not run again.
ENOUGH = 2.0


@dataclass(frozen=True)
class StepTimes:
    """Milliseconds of a step.

    Args:
        runs: of the step as a whole, with its drafters.
        drafters: of the drafters that run before the step.
        of_calls: of each call in one step, by function of the printed step and index of the call. Calls of bodies run
            the compiled bodies.
        in_bodies: of each call within bodies that run op by op, by the same keys.
    """

    context: int
    runs: tuple[float, ...]
    drafters: float
    of_calls: Mapping[tuple[str, int], float] = field(default_factory=dict)
    in_bodies: Mapping[tuple[str, int], float] = field(default_factory=dict)

    @property
    def fastest(self) -> float:
        """Fastest run: the one with the least interference from other work on the machine."""
        return min(self.runs)

    @property
    def median(self) -> float:
        """Median of the runs, in milliseconds."""
        return statistics.median(self.runs)


def measure_steps(
    arena: Arena, tiers: Mapping[int, Tier], backend: Backend, outlined: StepGraph, context: int | None = None
) -> dict[int, StepTimes]:
    """Run the tiers in alternation over the dummy slot. Live slots do not change. No other step may run meanwhile.

    Args:
        tiers: by any key, which the result has too.
        outlined: the graph whose bodies the steps call.
        context: tokens of each row; None is 256, or half of ``max_len``.
    """
    context = min(CONTEXT, max(1, arena.layout.max_len // 2)) if context is None else context
    taken: dict[int, list[float]] = {key: [] for key in tiers}
    with dummy_rows(arena, context):
        spent = dict.fromkeys(tiers, 0.0)
        for turn in range(RUNS + 1):
            for key, tier in tiers.items():
                if turn > 1 and spent[key] > ENOUGH:
                    continue
                seconds = _seconds(tier.run, arena)
                spent[key] += seconds
                if turn:
                    taken[key].append(1e3 * seconds)
        found = {}
        for key, tier in tiers.items():
            before = sum(_fastest(segment.run_target, arena) for segment in tier.segments)
            times = StepTimes(context, tuple(taken[key]), 1e3 * before)
            if not traits_of(arena.device).asynchronous:
                calls = _laps(replace(tier, executable=_timed(tier, backend, outlined), drafter=None))
                inner = _laps(replace(tier, executable=_timed(tier, Eager(""), outlined), drafter=None))
                times = replace(times, of_calls=calls, in_bodies=inner)
            found[key] = times
        return found


def _timed(tier: Tier, backend: Backend, outlined: StepGraph) -> Callable[..., object]:
    return load(backend, with_laps(tier.step.source), outlined, f"{tier.name}, timed")


def _laps(tier: Tier) -> Laps:
    """Milliseconds of one step by function and call, from the fastest run."""
    fastest: tuple[float, Laps] | None = None
    for turn in range(RUNS_IN_PARTS + 1):
        with timing() as laps:
            tier.run_target()
        total = sum(laps.values())
        if turn and (fastest is None or total < fastest[0]):
            fastest = total, laps
    assert fastest is not None
    return {place: 1e3 * seconds for place, seconds in fastest[1].items()}


def _seconds(run: Callable[[], None], arena: Arena) -> float:
    started = time.perf_counter()
    run()
    if traits_of(arena.device).asynchronous:
        torch.cuda.synchronize(arena.device)
    return time.perf_counter() - started


def _fastest(run: Callable[[], None], arena: Arena) -> float:
    return min(_seconds(run, arena) for _ in range(RUNS_IN_PARTS))

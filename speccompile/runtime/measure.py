"""How long a step of each tier takes: all of them run over the dummy slot, which no request owns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from speccompile.lowering.tier import KINDS, Tier, TierName
from speccompile.policies.costs import CostTable, TierCost
from speccompile.progress import task
from speccompile.runtime.arena import Arena

#: Timed runs of a tier at a context, behind one that is not timed.
REPEATS = 5
#: Tokens of the longer of the two contexts, if a slot has that many.
LONG = 512


def measure_tiers(arena: Arena, tiers: Mapping[TierName, Tier]) -> CostTable:
    """Milliseconds of every tier, at two contexts. Nothing of a live slot changes.

    Of the kinds of a tier the first is timed: what others do besides is the same at every draft length. Tiers take
    turns, so that what slows the machine for a while slows them all.
    """
    kind = next(kind for kind in KINDS if any(built == kind for _, _, built in tiers))
    timed = {(rows, draft_len): tier for (draft_len, rows, built), tier in tiers.items() if built == kind}
    contexts = (1, max(2, min(LONG, arena.layout.max_len // 2)))
    with task("time the tiers"), _dummy_rows(arena):
        short, long = (_seconds(arena, timed, context) for context in contexts)
    return CostTable({key: _cost(short[key], long[key], contexts[1] - contexts[0]) for key in timed})


def _cost(short: float, long: float, tokens: int) -> TierCost:
    return TierCost(1e3 * short, max(0.0, 1e3 * (long - short) / tokens))


def _seconds(arena: Arena, tiers: Mapping[tuple[int, int], Tier], context: int) -> dict[tuple[int, int], float]:
    arena["length"][arena.layout.dummy_slot] = context
    taken: dict[tuple[int, int], list[float]] = {key: [] for key in tiers}
    for turn in range(REPEATS + 1):
        for key, tier in tiers.items():
            started = time.perf_counter()
            tier.run()
            if arena.device.type == "cuda":
                torch.cuda.synchronize(arena.device)
            if turn:
                taken[key].append(time.perf_counter() - started)
    return {key: statistics.median(values) for key, values in taken.items()}


@contextmanager
def _dummy_rows(arena: Arena) -> Iterator[None]:
    """All rows are the dummy slot's meanwhile; afterwards it is as it was, and rows have their slots again."""
    with arena.parked():
        try:
            yield
        finally:
            arena.reset_slot(arena.layout.dummy_slot)

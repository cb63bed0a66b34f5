"""Time of a step of each tier. All of them run over the dummy slot, which no request owns."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from speccompile.graph.arena import Arena
from speccompile.graph.keys import KINDS, TierName
from speccompile.graph.splicing import PREFIX
from speccompile.lowering.tier import Tier
from speccompile.policies.costs import CostTable, TierCost
from speccompile.utils.devices import traits_of
from speccompile.utils.progress import task

#: Least and most timed runs of a tier, after one that is not timed. Two runs of a quick step can differ by a fifth.
REPEATS, MOST_REPEATS = 2, 8
#: Seconds after which no tier is timed more often than that least number.
QUICK = 0.1
#: Seconds after which no tier is timed again: for such slow steps one run is enough.
ENOUGH = 2.0
#: Tokens of the longer of the two contexts, if a slot has that many.
LONG = 512

#: Rows, draft length, and whether the tier's split drafter runs before it.
Key = tuple[int, int, bool]


def measure_tiers(arena: Arena, tiers: Mapping[TierName, Tier], *, undrafted: bool = False) -> CostTable:
    """Measure the milliseconds of every tier. They are a first estimate, which
    :class:`~speccompile.policies.costs.RunningCosts` corrects. No live slot changes.

    Args:
        undrafted: also time steps without their split drafter. It never runs before K=0, which is timed once.

    A request's first step waits for this, so it must be quick. Only the fewest and the most rows are timed, and values
    between them are interpolated linearly. A longer context is timed with the smallest and the largest draft length.
    Only the first kind of a tier is timed: the additional work of other kinds is the same at every draft length.
    """
    kind = next(kind for kind in KINDS if any(built == kind for _, _, built in tiers))
    own = {
        (rows, draft_len, drafted): tier.run if drafted else tier.run_target
        for (draft_len, rows, built), tier in tiers.items()
        if built == kind
        for drafted in (True, *[False] * (undrafted and draft_len != 0))
    }
    counts, draft_lens = ({key[part] for key in own} for part in (0, 1))
    timed = {key: run for key, run in own.items() if key[0] in (min(counts), max(counts))}
    ends = {key: run for key, run in timed.items() if key[1] in (min(draft_lens), max(draft_lens))}
    contexts = (1, max(2, min(LONG, arena.layout.max_len // 2)))
    enough = time.perf_counter() + ENOUGH
    with task("time the tiers"), dummy_rows(arena):
        short = _seconds(arena, timed, contexts[0], enough)
        long = _seconds(arena, ends, contexts[1], enough) if time.perf_counter() < enough else {}
    tokens = contexts[1] - contexts[0]
    slopes = {key: max(0.0, seconds - short[key]) / tokens for key, seconds in long.items()}
    costs = {key: TierCost(1e3 * _between(key, short), 1e3 * _between(key, slopes)) for key in own}
    drafted, without = (
        {(rows, draft_len): cost for (rows, draft_len, runs), cost in costs.items() if runs is which}
        for which in (True, False)
    )
    return CostTable(
        drafted, {**{key: cost for key, cost in drafted.items() if key[1] == 0}, **without} if without else {}
    )


def _between(key: Key, values: Mapping[Key, float]) -> float:
    """Interpolate the value at ``key`` linearly between known ones; 0 if none is known. K=0 belongs to both kinds of
    steps."""
    rows, draft_len, drafted = key
    known = {(own, k): value for (own, k, runs), value in values.items() if runs is drafted or k == 0}
    if not known:
        return 0.0
    columns = {}
    for count in {count for count, _ in known}:
        columns[count] = _on_line(draft_len, {k: value for (own, k), value in known.items() if own == count})
    return _on_line(rows, columns)


def _on_line(point: int, known: Mapping[int, float]) -> float:
    if point in known:
        return known[point]
    below = max(at for at in known if at <= point)
    above = min(at for at in known if at >= point)
    share = (point - below) / (above - below) if above > below else 0.0
    return known[below] + share * (known[above] - known[below])


def _seconds(arena: Arena, runs: Mapping[Key, Callable[[], None]], context: int, enough: float) -> dict[Key, float]:
    """Return the shortest run of each, without the first one if there are others. Runs alternate, so a slow phase of
    the machine affects all of them."""
    _set_context(arena, context)
    taken: dict[Key, list[float]] = {}
    quick = time.perf_counter() + QUICK
    for turn in range(MOST_REPEATS + 1):
        now = time.perf_counter()
        if (turn and now > enough) or (turn > REPEATS and now > quick):
            break
        for key, run in runs.items():
            started = time.perf_counter()
            run()
            if traits_of(arena.device).asynchronous:
                torch.cuda.synchronize(arena.device)
            taken.setdefault(key, []).append(time.perf_counter() - started)
    return {key: min(values[1:] or values) for key, values in taken.items()}


@contextmanager
def dummy_rows(arena: Arena, context: int | None = None) -> Iterator[None]:
    """Bind all rows to the dummy slot in this context, with ``context`` tokens each if that is given. Afterwards the
    dummy slot is reset, and rows have their slots again."""
    with arena.parked():
        try:
            if context is not None:
                _set_context(arena, context)
            yield
        finally:
            arena.reset_slot(arena.layout.dummy_slot)
            if arena.layout.paging is not None:
                arena.set_pages(arena.layout.dummy_slot, [])


def _set_context(arena: Arena, context: int) -> None:
    """Let the dummy slot have ``context`` tokens. The target reads pages of others, and writes to none of them. A
    drafter's network would: it reads tokens that it has not read yet."""
    layout = arena.layout
    arena.write("length", layout.dummy_slot, context)
    has_network = any(tensor.in_pages and name.startswith(PREFIX) for name, tensor in layout.tensors.items())
    if layout.paging is not None and not has_network:
        read = (context - 1) // layout.paging.size
        arena.set_pages(layout.dummy_slot, [1 + index % (layout.paging.count - 1) for index in range(read)])

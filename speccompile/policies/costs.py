"""The cost of a step of each tier: a table, and its correction while steps run."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

#: Weight of a new measurement in the correction that all tiers share (the machine), and in that of one tier.
SHARED, OWN = 0.1, 0.02
#: Largest ratio of a measurement to the expected cost. A single step may be very slow (another process, a page fault).
LONGEST = 2.0


@dataclass(frozen=True)
class TierCost:
    """Milliseconds of a step: ``fixed``, and ``per_token`` of the rows' mean context."""

    fixed: float
    per_token: float = 0.0

    def at(self, context: float) -> float:
        """Milliseconds of a step at a mean context of ``context`` tokens."""
        return self.fixed + self.per_token * context


@dataclass(frozen=True)
class CostTable:
    """Costs of every tier, by row count of the executable and draft length. ``undrafted`` are the costs of steps before
    which a split drafter does not run, if there are any."""

    entries: Mapping[tuple[int, int], TierCost]
    undrafted: Mapping[tuple[int, int], TierCost] = field(default_factory=dict)

    @cached_property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths that were timed, ascending."""
        return tuple(sorted({draft_len for _, draft_len in self.entries}))

    @cached_property
    def row_counts(self) -> tuple[int, ...]:
        """The row counts that were timed, ascending."""
        return tuple(sorted({rows for rows, _ in self.entries}))

    def rows(self, live_rows: int) -> int:
        """Row count of the executable that runs ``live_rows`` rows; the largest one if none holds them."""
        counts = self.row_counts
        return counts[min(bisect_left(counts, live_rows), len(counts) - 1)]

    def ms(self, live_rows: int, draft_len: int, context: float = 0.0, *, drafted: bool = True) -> float:
        """Milliseconds of a step of ``live_rows`` rows with the mean context ``context``. ``drafted``: a split drafter
        runs before the step."""
        entries = self.entries if drafted or not self.undrafted else self.undrafted
        return entries[self.rows(live_rows), draft_len].at(context)

    def describe(self, live_rows: int) -> str:
        """The costs of all tiers for ``live_rows`` rows at an empty context, as one line of text."""
        return ", ".join(f"{self.ms(live_rows, k):.1f} ms at K={k}" for k in self.draft_lens)

    def as_json(self) -> dict[str, list[list[float]]]:
        """``[rows, K, fixed, per_token]`` of each entry, by the name of the field."""
        return {name: _as_json(getattr(self, name)) for name in ("entries", "undrafted")}

    @classmethod
    def from_json(cls, data: Any) -> CostTable:
        """Read the result of :meth:`as_json`. Raises KeyError, TypeError or ValueError if ``data`` is something
        else."""
        table = cls(_from_json(data["entries"]), _from_json(data["undrafted"]))
        if not table.entries or (table.undrafted and set(table.undrafted) != set(table.entries)):
            raise ValueError("a tier is missing for some row count")
        return table


def _as_json(entries: Mapping[tuple[int, int], TierCost]) -> list[list[float]]:
    return [[rows, k, cost.fixed, cost.per_token] for (rows, k), cost in sorted(entries.items())]


def _from_json(data: Any) -> dict[tuple[int, int], TierCost]:
    entries = {(int(rows), int(k)): TierCost(float(fixed), float(slope)) for rows, k, fixed, slope in data}
    counts, lens = ({key[part] for key in entries} for part in (0, 1))
    if len(entries) != len(counts) * len(lens):
        raise ValueError("a tier is missing for some row count")
    if not all(0 < cost.fixed < math.inf and 0 <= cost.per_token < math.inf for cost in entries.values()):
        raise ValueError("the cost of a step must be positive and finite")
    return entries


class RunningCosts:
    """A table of costs that is corrected by the measured time of steps.

    A slower machine must not count against the tier that happens to run. The correction therefore has a part that all
    tiers share, which adapts quickly, and a part for each tier.
    """

    def __init__(self, table: CostTable) -> None:
        self._table = table
        self._shared: dict[int, float] = {}
        # By rows, draft length, and whether a drafter runs before the step. Before K=0 none does.
        self._own: dict[tuple[int, int, bool], float] = {}

    def ms(self, live_rows: int, draft_len: int, context: float, *, drafted: bool = True) -> float:
        """Milliseconds of a step: the table's value, corrected by the observed steps."""
        (milliseconds,) = self.of_tiers(live_rows, (draft_len,), context, drafted=drafted).values()
        return milliseconds

    def of_tiers(
        self, live_rows: int, draft_lens: Iterable[int], context: float, *, drafted: bool = True
    ) -> dict[int, float]:
        """:meth:`ms` of each draft length."""
        table = self._table
        rows = table.rows(live_rows)
        entries = table.entries if drafted or not table.undrafted else table.undrafted
        shared, found = self._shared.get(rows, 1.0), {}
        for draft_len in draft_lens:
            cost = entries[rows, draft_len]
            own = self._own.get((rows, draft_len, drafted and draft_len != 0), 1.0)
            found[draft_len] = shared * own * (cost.fixed + cost.per_token * context)
        return found

    def note(
        self, live_rows: int, draft_len: int, context: float, milliseconds: float, *, drafted: bool = True
    ) -> None:
        """Correct the costs by the time of a step."""
        rows = self._table.rows(live_rows)
        key = (rows, draft_len, drafted and draft_len != 0)
        ratio = min(milliseconds / self.ms(live_rows, draft_len, context, drafted=drafted), LONGEST)
        self._shared[rows] = self._shared.get(rows, 1.0) * ratio**SHARED
        self._own[key] = self._own.get(key, 1.0) * ratio**OWN

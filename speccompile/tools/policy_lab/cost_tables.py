"""Cost tables for the policy lab."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from speccompile.policies.costs import CostTable, TierCost

Cost = Callable[[int, int], TierCost]

#: Costs of a step by rows and drafts. ``flat``: all widths cost the same. ``linear``: each draft costs the same.
#: ``cpu``: SmolLM2-135M with packed weights on two cores, measured with ``python -m benchmarks.steps``.
TABLES: dict[str, Cost] = {
    "flat": lambda rows, draft_len: TierCost(10.0),
    "linear": lambda rows, draft_len: TierCost(10.0 + 1.3 * draft_len),
    "cpu": lambda rows, draft_len: TierCost(18.6 + 0.8 * (rows - 1) + 0.22 * draft_len * rows, 0.003),
}


def cost_table(name: str, draft_lens: Sequence[int], row_counts: Sequence[int] = (1, 2, 4, 8)) -> CostTable:
    """Return one of :data:`TABLES` for the given tiers."""
    return CostTable({(rows, k): TABLES[name](rows, k) for rows in row_counts for k in draft_lens})

"""A small pass of a user's own, and a wrap that it goes into."""

from __future__ import annotations

from typing import Any

import torch

from speccompile.graph.state import N
from speccompile.passes import Changes, Pass, StateSpec, StepGraph

OPTIONS: dict[str, Any] = {"tiers": (0, 2), "max_len": 48, "backend": "eager"}


def own(**fields: Any) -> Pass:
    """A pass that counts steps in ``seen``, but for what ``fields`` say."""

    def run(self: Pass, graph: StepGraph) -> Changes:
        graph.insert(lambda seen, slots: seen.index_add_(0, slots, torch.ones_like(slots)), *nodes(graph))
        return Changes(1)

    given = {"name": "count", "looks_for": "rows", "after": "bind_rows", "run": run} | fields
    given.setdefault("state_specs", lambda self: [StateSpec("seen", (N,), torch.int64)])
    cls: type[Pass] = type("Own", (Pass,), given)
    return cls()


def nodes(graph: StepGraph) -> tuple[Any, Any]:
    return graph.state("seen"), graph.values["slots"]

"""The slots that the rows of a step work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class BindRows(Pass):
    """Row i works on slot ``source[i]``; ``source`` is a state tensor that the host fills before a run.

    Args:
        rows: how many rows the step has; its slots are the first ones in ``source``.
    """

    rows: int
    source: str = "slots"

    name: ClassVar[str] = "bind_rows"
    named_values: ClassVar[tuple[str, ...]] = ("slots",)
    looks_for: ClassVar[str] = "the input row_slots"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("rows")

    def run(self, graph: StepGraph) -> Changes:
        source = graph.state(self.source)
        slots = source
        if self.rows < graph.ports[self.source].shape[0]:
            slots = graph.insert(first_rows, source, before=graph.anchors.start, rows=self.rows)
        graph.bind_input("row_slots", slots)
        graph.values["slots"] = slots
        rows = self.rows
        for name, port in graph.ports.items():
            if port.role == "input":
                graph.ports[name] = replace(port, shape=(rows, *port.shape[1:]))
        graph.sizes = {**graph.sizes, "B": rows}
        return Changes(1, f"rows over the slots in {self.source!r}, {rows} a step")


def first_rows(values: torch.Tensor, *, rows: int) -> torch.Tensor:
    """The values of the first rows, ``[rows, ...]``."""
    return values[:rows]

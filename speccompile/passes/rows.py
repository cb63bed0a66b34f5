"""Which slots the rows of a step work on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts


@dataclass(frozen=True)
class BindRows(Pass):
    """Row i works on slot ``source[i]``; ``source`` is a state tensor that the host fills before a run."""

    source: str = "slots"

    name: ClassVar[str] = "bind_rows"
    looks_for: ClassVar[str] = "the input row_slots"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("rows")

    def run(self, graph: StepGraph) -> Changes:
        slots = graph.state(self.source)
        graph.bind_input("row_slots", slots)
        graph.values["slots"] = slots
        rows = graph.ports[self.source].shape[0]
        for name in ("input_ids", "position_ids"):
            port = graph.ports[name]
            graph.ports[name] = replace(port, shape=(rows, *port.shape[1:]))
        graph.sizes = {**graph.sizes, "B": rows}
        return Changes(1, f"rows over the slots in {self.source!r}, {rows} a step")

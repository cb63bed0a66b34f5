"""Steps whose rows use no processor but temperature, top-k, top-p and min-p."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.sampling.filters import FILTERS

FILTERS_ONLY = "filters_only"


@dataclass(frozen=True)
class UseFilters(Pass):
    """From here on passes insert :func:`~speccompile.sampling.filters.filter_logits` in the place of all processors."""

    name: ClassVar[str] = "use_filters"
    looks_for: ClassVar[str] = "a step"
    region: ClassVar[PassRegion] = "choose"
    provides: ClassVar[Facts] = facts(FILTERS_ONLY)
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "temperature, top_k, top_p and min_p will be one op")


def uses_filters(graph: StepGraph) -> bool:
    """Whether the rows of the step use no other processor."""
    return FILTERS_ONLY in graph.facts


def filter_state(graph: StepGraph) -> list[fx.Node]:
    """The state of the filters, as their ops receive it."""
    return [graph.state(spec.name) for processor in FILTERS for spec in processor.state]

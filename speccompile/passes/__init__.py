"""Passes over step graphs: what a pass is, and the pipeline that runs, checks and records them.

``Pass`` is the class to derive from for ``wrap(passes=[...])``. ``docs/architecture/passes.md`` lists the passes that
can be anchors, and the values that they leave in ``graph.values``.
"""

from speccompile.graph.state import StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Pass, facts

__all__ = ["Changes", "Pass", "StateSpec", "StepGraph", "facts"]

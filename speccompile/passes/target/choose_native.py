"""Replacement of ops by the C++ forms that round in another way."""

from __future__ import annotations

from collections.abc import Mapping

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes
from speccompile.utils.torch_private import OpOverload


def choose_native(graph: StepGraph, native: Mapping[OpOverload, OpOverload]) -> Changes:
    """Call ``native[op]`` at each call of ``op``."""
    found = [node for node in graph.graph.nodes if node.target in native]
    for node in found:
        node.target = native[node.target]
    return Changes(len(found), f"{len(found)} C++ ops")

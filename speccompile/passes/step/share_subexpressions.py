"""Common subexpressions: an op that was computed before from the same values is not computed again.

Passes insert functions without knowledge of one another, so many of them gather the same rows of state. Inductor
shares equal ops by itself; the printed step and the eager backend get it here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import storages_of, written
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class ShareSubexpressions(Pass):
    """Reads the first of equal ops in the place of all.

    Ops are equal if target and arguments are, and no tensor that they read was written in between. Ops that write, draw
    random numbers, or whose result is written later stay as they are, and so do named values and anchors.
    """

    name: ClassVar[str] = "share_subexpressions"
    looks_for: ClassVar[str] = "equal ops"
    region: ClassVar[PassRegion] = "model"
    provides: ClassVar[Facts] = facts("subexpressions_shared")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        storages, placeholders = storages_of(graph), frozenset(graph.placeholders)
        writes = {node: _written_storages(graph, node, storages) for node in graph.graph.nodes}
        written_anywhere: set[fx.Node] = set().union(*writes.values())
        anchors = graph.anchors
        kept = {anchors.tokens, anchors.positions, anchors.start, *anchors.layers, anchors.final_norm, anchors.lm_head}
        kept.update(graph.values.values(), graph.output.all_input_nodes)
        versions: Counter[fx.Node] = Counter()
        first: dict[Hashable, fx.Node] = {}
        shared = 0
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and not writes[node] and not _is_random(node):
                own = storages[node] - placeholders
                if not own & written_anywhere:
                    key = _key(node, storages, versions)
                    if key not in first:
                        first[key] = node
                    elif node not in kept:
                        graph.replace(node, first[key])
                        shared += 1
                        continue
            versions.update(writes[node])
        return Changes(shared, f"{shared} ops computed once")


def _written_storages(graph: StepGraph, node: fx.Node, storages: dict[fx.Node, frozenset[fx.Node]]) -> set[fx.Node]:
    return {storage for target in written(graph, node) for storage in storages[target]}


def _is_random(node: fx.Node) -> bool:
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def _key(node: fx.Node, storages: dict[fx.Node, frozenset[fx.Node]], versions: Counter[fx.Node]) -> Hashable:
    """Equal for calls that compute the same."""
    read = {storage for source in node.all_input_nodes for storage in storages[source]}
    state = frozenset((storage, versions[storage]) for storage in read if versions[storage])
    return node.target, _frozen(node.args), _frozen(node.kwargs), state


def _frozen(value: Any) -> Hashable:
    """An argument, hashable. 1, 1.0 and True are different arguments."""
    if isinstance(value, list | tuple):
        return tuple, tuple(map(_frozen, value))
    if isinstance(value, dict):
        return dict, tuple((name, _frozen(item)) for name, item in sorted(value.items()))
    if isinstance(value, slice):
        return slice, tuple(map(_frozen, (value.start, value.stop, value.step)))
    if isinstance(value, float):
        # -0.0 equals 0.0.
        return float, repr(value)
    return type(value), value

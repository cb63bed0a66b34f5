"""Forwards of a drafter's network over the nodes of a tree.

Each level reads all nodes again, in one forward. This costs little compared with reading the weights, and the attention
op receives the whole tree. The KV of nodes is stored after that of the sequence, in the order in which nodes are read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.modes.network.other_vocabulary import over_target
from speccompile.modes.network.passes import drafter_of, forward_drafter, forward_model
from speccompile.ops.draft_levels import first_place, positions_of_nodes
from speccompile.ops.draft_rows import form_of, newest_tokens
from speccompile.passes.step.draft_tree import DraftTree, ReadNodes, TreeForward
from speccompile.passes.step.tree_expansions import expansions
from speccompile.passes.target.tree_bodies import SUFFIX

#: Further inputs of a network over nodes, int64 ``[B, T]``: the position of each node's KV, and its parent, in the form
#: of the attention op.
PLACES, PARENTS = "places", "parents"


def of_trees(drafter: StepGraph) -> StepGraph:
    """``drafter`` with the bodies that :class:`~speccompile.passes.target.tree_bodies.AddTreeBodies` added, and their
    further inputs."""
    graph = drafter.copy()
    positions = graph.ports["position_ids"]
    inputs = []
    for name in (PLACES, PARENTS):
        with graph.graph.inserting_after(graph.placeholders[-1]):
            node = graph.graph.placeholder(name)
        graph.ports[name] = Port(name, "input", positions.shape, positions.dtype, positions.device)
        inputs.append(node)
    for node in graph.graph.nodes:
        if node.op == "call_module" and graph.bodies[str(node.target)].part == "layers":
            node.target = f"{node.target}{SUFFIX}"
            node.args = (*node.args, *inputs)
    return graph


class NodeReader:
    """Inserts forwards over nodes of a tree.

    Args:
        tree: its expansions define the number of nodes.
        ahead: after a sequence of L tokens, the row of a tree's first token has position ``L - ahead``.
    """

    def __init__(self, graph: StepGraph, tree: Tree, *, ahead: int) -> None:
        self._graph, self._before, self._slots = graph, graph.anchors.start, graph.values["slots"]
        self._drafter = of_trees(drafter_of(graph))
        read = sum(level.count for level in expansions(tree)[1:])
        most = self._drafter.layout.cache_len - max(read, 1)
        length = graph.state("length")
        self._first = graph.insert(
            form_of(first_place, graph.facts), length, self._slots, before=self._before, ahead=ahead, most=most
        )

    def read(self, nodes: ReadNodes, output: str, given: Mapping[str, fx.Node] | None = None) -> fx.Node:
        """The value ``output`` of the network ``[B, m, ...]``, for the nodes of the newest level.

        Args:
            given: see :func:`~speccompile.modes.network.passes.forward_drafter`.
        """
        graph, before = self._graph, self._before
        positions, places = graph.insert(
            form_of(positions_of_nodes, graph.facts), self._first, before=before, levels=nodes.levels
        )
        (found,) = forward_drafter(
            graph,
            nodes.tokens,
            positions,
            self._slots,
            before=before,
            outputs=(output,),
            given={**(given or {}), PLACES: places, PARENTS: nodes.parents},
            drafter=self._drafter,
        )
        last: fx.Node = graph.insert(last_rows, found, before=before, count=nodes.newest)
        return last

    def follows(self, hidden: fx.Node, given: str, outputs: Sequence[str]) -> list[fx.Node]:
        """The values ``outputs`` of the network, computed from ``hidden`` ``[B, m, H]`` instead of its value ``given``.

        ``given`` is the output of the last layer, so only the shape of tokens and positions is read.
        """
        tokens = self._graph.insert(some_tokens, hidden, before=self._before)
        stands = {given: hidden}
        return forward_drafter(
            self._graph, tokens, tokens, self._slots, before=self._before, outputs=outputs, given=stands
        )


@dataclass(frozen=True)
class DraftTreeByNetwork(DraftTree):
    """Draft a tree with forwards of a language model: first over the newest committed token, then over nodes."""

    name: ClassVar[str] = "draft_tree_by_network"
    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    looks_for: ClassVar[str] = "the mode's network"

    def forward(self, graph: StepGraph) -> TreeForward:
        return ModelForward(graph, self.tree)

    def max_len(self, graph: StepGraph) -> int:
        return drafter_of(graph).layout.max_len


class ModelForward:
    """Forwards of a draft model over the levels of a tree."""

    def __init__(self, graph: StepGraph, tree: Tree) -> None:
        self._graph, self._reader = graph, NodeReader(graph, tree, ahead=0)

    def after_text(self) -> fx.Node:
        graph, start, slots = self._graph, self._graph.anchors.start, self._graph.values["slots"]
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": 1, "max_len": drafter_of(graph).layout.max_len}
        token, position, _ = graph.insert(form_of(newest_tokens, graph.facts), *state, slots, before=start, **sizes)
        return forward_model(graph, token, position, slots, before=start)

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        (logits,) = self._reader.follows(self._reader.read(nodes, "kv"), "kv", ("logits",))
        return over_target(self._graph, logits, self._graph.anchors.start)


def some_tokens(hidden: torch.Tensor) -> torch.Tensor:
    """Token ids ``[B, m]``, int64, for ``hidden`` ``[B, m, H]``. Their values are not read."""
    return hidden.new_zeros(hidden.shape[:2], dtype=torch.int64)


def last_rows(rows: torch.Tensor, *, count: int) -> torch.Tensor:
    """The last ``count`` rows ``[B, count, ...]`` of ``[B, n, ...]``."""
    return rows[:, -count:]

"""Drafting of a tree from one forward of a block, where each node's token changes the logits after it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.modes.dflash.passes import STATE, DraftBlock
from speccompile.modes.network.draft_at_once import at_place
from speccompile.ops.draft_rows import form_of, newest_tokens
from speccompile.ops.verify_tree import rows_on_path
from speccompile.passes.step.draft_tree import DraftTree, ReadNodes, TreeForward


@dataclass(frozen=True)
class DraftMarkovTree(DraftTree):
    """Draft a tree, level after level, from the forward of ``block``, whose draft length is the tree's depth."""

    block: DraftBlock = field(kw_only=True)

    name: ClassVar[str] = "draft_markov_tree"
    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    looks_for: ClassVar[str] = "the mode's head"

    def forward(self, graph: StepGraph) -> TreeForward:
        return _BlockForward(graph, self.block)

    def max_len(self, graph: StepGraph) -> int:
        return self.block.max_len(graph)

    def token_ids(self, graph: StepGraph) -> fx.Node | None:
        return self.block.token_ids(graph)


class _BlockForward:
    """One forward of a block, and the bias at each level."""

    def __init__(self, graph: StepGraph, block: DraftBlock) -> None:
        self._graph, self._block = graph, block
        start, slots = graph.anchors.start, graph.values["slots"]
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": block.draft_len, "max_len": block.max_len(graph)}
        token, position, _ = graph.insert(form_of(newest_tokens, graph.facts), *state, slots, before=start, **sizes)
        self._token, self._logits = token, block.logits(graph, token, position)

    def after_text(self) -> fx.Node:
        return self._after(self._token, 0)

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        graph = self._graph
        if (state := graph.values.get(STATE)) is not None:
            function = form_of(rows_on_path, graph.facts)
            graph.values[STATE] = graph.insert(function, state, nodes.came_from, before=graph.anchors.start)
        return self._after(nodes.newest_tokens, nodes.levels[-1])

    def _after(self, token: fx.Node, place: int) -> fx.Node:
        logits = self._graph.insert(at_place, self._logits, before=self._graph.anchors.start, place=place)
        return self._block.after_token(self._graph, logits, token, place)

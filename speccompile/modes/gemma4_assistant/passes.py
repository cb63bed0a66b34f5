"""Passes of a Gemma 4 assistant: keeping the target's hidden state, and drafting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.paging import PAGES
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.network.head_passes import newest_rows
from speccompile.ops.draft_rows import form_of, newest_tokens
from speccompile.ops.verify_tree import rows_on_path
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.draft_chain import DraftChain, Forward
from speccompile.passes.step.draft_tree import DraftTree, ReadNodes, TreeForward
from speccompile.passes.step.propose_from_hidden import last_hidden

#: State ``[N, M]``: the target's hidden state before the newest token of each sequence.
HIDDEN = "hidden_before_newest"
#: Tensors by name, which the graph holds.
Weights = tuple[tuple[str, torch.Tensor], ...]


@dataclass(frozen=True)
class KeepNewestHidden(Pass):
    """Store the target's hidden state before the newest token of each row."""

    name: ClassVar[str] = "keep_newest_hidden"
    looks_for: ClassVar[str] = "tapped hidden states"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("target_inputs", "committed", "tapped")
    provides: ClassVar[Facts] = facts("newest_hidden_kept")

    def run(self, graph: StepGraph) -> Changes:
        values = [graph.values[name] for name in ("slots", "positions", "tapped")]
        graph.insert(keep_newest_hidden, graph.state(HIDDEN), graph.state("length"), *values)
        return Changes(1)


def keep_newest_hidden(
    kept: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, tapped: torch.Tensor
) -> None:
    """Write to ``kept`` ``[N, M]``. Other arguments: see
    :func:`~speccompile.passes.step.propose_from_hidden.last_hidden`."""
    kept.index_put_((slots,), last_hidden(length, slots, positions, tapped))


class _Rows:
    """Inserts rows of an assistant before ``graph.anchors.start``."""

    def __init__(self, graph: StepGraph, rows: Callable[..., object], kv: tuple[str, ...], weights: Weights) -> None:
        self._graph, self._rows, self._before = graph, rows, graph.anchors.start
        pages = [] if graph.layout.paging is None else [graph.state(PAGES)]
        self._given = [*pages, *map(graph.state, kv), *(graph.constant(name, value) for name, value in weights)]
        self._options = {"paged": bool(pages), "tensors": len(kv)}
        #: The hidden states of the newest rows, ``[B, n, M]``.
        self.carried = newest_rows(graph, graph.values["slots"], self._before, HIDDEN)

    def after(self, token: fx.Node, position: fx.Node) -> fx.Node:
        """Logits ``[B, n, V]`` after ``token`` ``[B, n]``."""
        given = (token, self.carried, self._graph.values["slots"], position, *self._given)
        logits, self.carried = self._graph.insert(self._rows, *given, before=self._before, **self._options)
        found: fx.Node = logits
        return found

    def select(self, came_from: fx.Node) -> None:
        """Continue from the rows ``came_from`` ``[B, m]``."""
        function = form_of(rows_on_path, self._graph.facts)
        self.carried = self._graph.insert(function, self.carried, came_from, before=self._before)


@dataclass(frozen=True)
class DraftByAssistant(DraftChain):
    """Draft a chain. All rows have the position of the newest committed token.

    Args:
        rows: see :meth:`speccompile.modes.gemma4_assistant.mode.Gemma4Assistant.rows`.
        kv: names of the target's KV.
    """

    rows: Callable[..., object] = field(kw_only=True)
    kv: tuple[str, ...] = field(kw_only=True)
    weights: Weights = field(kw_only=True, compare=False)

    name: ClassVar[str] = "draft_by_assistant"
    looks_for: ClassVar[str] = "the target's KV"

    def forward(self, graph: StepGraph) -> Forward:
        rows, first = _Rows(graph, self.rows, self.kv, self.weights), list[fx.Node]()

        def forward(token: fx.Node, position: fx.Node, place: int) -> fx.Node:
            first.append(position)
            return rows.after(token, first[0])

        return forward

    def what(self, graph: StepGraph) -> str:
        return f"{self.draft_len} forwards over the target's KV"


@dataclass(frozen=True)
class DraftTreeByAssistant(DraftTree):
    """Draft a tree. Nodes have no KV: each continues from its parent's hidden state. Arguments: see
    :class:`DraftByAssistant`."""

    rows: Callable[..., object] = field(kw_only=True)
    kv: tuple[str, ...] = field(kw_only=True)
    weights: Weights = field(kw_only=True, compare=False)

    name: ClassVar[str] = "draft_tree_by_assistant"
    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    looks_for: ClassVar[str] = "the target's KV"

    def forward(self, graph: StepGraph) -> TreeForward:
        return _TreeRows(graph, _Rows(graph, self.rows, self.kv, self.weights))

    def max_len(self, graph: StepGraph) -> int:
        return graph.layout.max_len


class _TreeRows:
    """Rows of an assistant over the levels of a tree."""

    def __init__(self, graph: StepGraph, rows: _Rows) -> None:
        self._rows = rows
        state = [graph.state(name) for name in ("tokens", "length", "limit")]
        sizes = {"draft_len": 1, "max_len": graph.layout.max_len}
        given = (*state, graph.values["slots"])
        function = form_of(newest_tokens, graph.facts)
        self._token, self._position, _ = graph.insert(function, *given, before=graph.anchors.start, **sizes)

    def after_text(self) -> fx.Node:
        return self._rows.after(self._token, self._position)

    def after_nodes(self, nodes: ReadNodes) -> fx.Node:
        self._rows.select(nodes.came_from)
        return self._rows.after(nodes.newest_tokens, self._position)

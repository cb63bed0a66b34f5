"""Moving the values of an accepted path to the positions where a chain would have written them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.paging import PAGES
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.draft_rows import form_of
from speccompile.ops.verify_tree import rows_on_path
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.tap_hidden import MARK

#: Names of the target's KV.
KV = re.compile(r"[kv]_\d+")


@dataclass(frozen=True)
class MovePath(Pass):
    """Moves the KV of the accepted path, in all layers, to where a chain would have left it. KV of other nodes is after
    the end of the sequence, as that of rejected drafts of a chain is.

    Args:
        logits: ``logits`` become those of the nodes on the path, ``[B, 1 + depth, V]``.
    """

    logits: bool = False

    name: ClassVar[str] = "move_path"
    looks_for: ClassVar[str] = "the KV of an accepted path"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("accepted", "path")
    provides: ClassVar[Facts] = facts("path_moved")

    def run(self, graph: StepGraph) -> Changes:
        kv = [graph.state(name) for name in graph.layout.tensors if KV.fullmatch(name)]
        values = [graph.values[name] for name in ("slots", "root", "path", "row_accepted")]
        pages = [] if graph.layout.paging is None else [graph.state(PAGES)]
        graph.insert(move_path, *values, *pages, *kv, paged=bool(pages))
        if self.logits:
            follow(graph, "logits")
        return Changes(len(kv), f"{len(kv)} tensors")


@dataclass(frozen=True)
class FollowPath(Pass):
    """Selects the nodes on the path for a drafter's network that runs after the commit, ``[B, 1 + depth, ...]`` of
    marked hidden states, ``input_tokens`` and ``positions``.
    """

    name: ClassVar[str] = "follow_path"
    looks_for: ClassVar[str] = "what the target has read"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("target_inputs", "path", "committed")
    provides: ClassVar[Facts] = facts("path_followed")

    def run(self, graph: StepGraph) -> Changes:
        marks = [name for name in graph.values if name.startswith(MARK)]
        for name in marks:
            graph.values[name] = on_path(graph, graph.values[name])
        for name in ("input_tokens", "positions"):
            follow(graph, name)
        return Changes(len(marks) + 2)


def follow(graph: StepGraph, name: str) -> None:
    """Let the value of all nodes become that of the nodes on the path."""
    nodes = graph.values[name]
    nodes._rename(f"node_{name}")
    graph.name_value(name, on_path(graph, nodes))


def on_path(graph: StepGraph, nodes: fx.Node) -> fx.Node:
    """``[B, 1 + depth, ...]`` of a value ``[B, T, ...]`` of all nodes."""
    found: fx.Node = graph.insert(form_of(rows_on_path, graph.facts), nodes, graph.values["path"])
    return found


def move_path(
    slots: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    *kv: torch.Tensor,
    paged: bool = False,
) -> None:
    """``kv`` begins with the page table if it is ``paged``."""
    if paged:
        torch.ops.speccompile.move_path_(list(kv[1:]), slots, root, path, accepted, kv[0])
    else:
        torch.ops.speccompile.move_path_(list(kv), slots, root, path, accepted)

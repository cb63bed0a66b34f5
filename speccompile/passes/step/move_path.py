"""The KV of an accepted path moves to where that of a chain would be."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts

#: Names of the target's KV.
KV = re.compile(r"[kv]_\d+")


@dataclass(frozen=True)
class MovePath(Pass):
    """All layers at once. What the nodes beside the path have left is after the end of the sequence, as the KV of
    rejected drafts of a chain is.

    Args:
        logits: ``logits`` become those of the nodes on the path, ``[B, 1 + depth, V]``.
    """

    logits: bool = False

    name: ClassVar[str] = "move_path"
    looks_for: ClassVar[str] = "the KV of an accepted path"
    requires: ClassVar[Facts] = facts("accepted", "path")
    provides: ClassVar[Facts] = facts("path_moved")

    def run(self, graph: StepGraph) -> Changes:
        kv = [graph.state(name) for name in graph.layout.tensors if KV.fullmatch(name)]
        values = [graph.values[name] for name in ("slots", "root", "path", "row_accepted")]
        graph.insert(move_path, *values, *kv)
        if self.logits:
            logits = graph.insert(of_path, graph.values["logits"], graph.values["path"])
            graph.values["logits"]._rename("node_logits")
            graph.name_value("logits", logits)
        return Changes(len(kv), f"{len(kv)} tensors")


def move_path(
    slots: torch.Tensor, root: torch.Tensor, path: torch.Tensor, accepted: torch.Tensor, *kv: torch.Tensor
) -> None:
    torch.ops.speccompile.move_path_(list(kv), slots, root, path, accepted)


def of_path(logits: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """``[B, D, V]`` of ``[B, T, V]``, at the nodes ``path`` ``[B, D]``."""
    return logits[torch.arange(logits.shape[0], device=logits.device)[:, None], path]

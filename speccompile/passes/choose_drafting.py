"""Which kernels read the text that drafts are looked up in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph_capture.graph import StepGraph
from speccompile.lowering.ops.suffix import SCHEMAS
from speccompile.passes.base import Changes, Facts, Pass, facts


@dataclass(frozen=True)
class ChooseDrafting(Pass):
    """The C++ ops of drafters that have some; they propose the same."""

    name: ClassVar[str] = "choose_drafting"
    looks_for: ClassVar[str] = "an op of a drafter"
    requires: ClassVar[Facts] = facts("proposed")
    provides: ClassVar[Facts] = facts("drafting_chosen")
    # Most drafters are plain PyTorch.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        ops = torch.ops.speccompile
        native = {getattr(ops, name).default: getattr(ops, f"native_{name}").default for name in SCHEMAS}
        found = [node for node in graph.graph.nodes if node.target in native]
        for node in found:
            node.target = native[node.target]
        return Changes(len(found), f"{len(found)} ours")

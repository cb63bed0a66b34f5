"""Choice of the kernel for the semantic attention op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

import speccompile.ops.native  # noqa: F401  defines an op
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class ChooseAttention(Pass):
    """Choose the kernel of attention.

    ``attention`` is torch's own, row by row; ``attention_fixed_order`` the same for tiers of one shape;
    ``native_attention`` ours. Of the last two, a query's result does not depend on where in a step it stands.
    """

    kernel: Literal["attention", "attention_fixed_order", "native_attention"] = "attention"

    name: ClassVar[str] = "choose_attention"
    looks_for: ClassVar[str] = "speccompile::attention"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("attention_chosen")

    def run(self, graph: StepGraph) -> Changes:
        ops = torch.ops.speccompile
        kernel = getattr(ops, self.kernel).default
        found = graph.graph.find_nodes(op="call_function", target=ops.attention.default)
        for node in found:
            node.target = kernel
        return Changes(len(found), f"{len(found)} calls of {kernel}")


@dataclass(frozen=True)
class KeepAttention(Pass):
    """For a model that was captured with its own attention: it has no semantic op, and keeps its ops."""

    name: ClassVar[str] = "choose_attention"
    looks_for: ClassVar[str] = "the model's own attention"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("attention_chosen")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "the model's own attention, over a copy of each row's whole cache")


@dataclass(frozen=True)
class NoAttention(Pass):
    """For a model that has only recurrent layers, and no attention."""

    name: ClassVar[str] = "choose_attention"
    looks_for: ClassVar[str] = "attention"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("attention_chosen")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "no layer attends")

"""The kernels that choose tokens, and those that find the greatest scores before that."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops.choose  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.native.choose_native import choose_native
from speccompile.sampling.pipeline import PROCESSORS, registered_processors
from speccompile.sampling.threshold import ThresholdProcessor
from speccompile.utils.torch_private import OpOverload


@dataclass(frozen=True)
class ChooseSampling(Pass):
    """``native``: the C++ ops, which choose the same tokens; else torch's own. A drafter's draws are among them."""

    native: bool = False

    name: ClassVar[str] = "choose_sampling"
    looks_for: ClassVar[str] = "speccompile::choose"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("accepted")
    provides: ClassVar[Facts] = facts("sampling_chosen")
    # A rule may choose in its own way.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        if not self.native:
            return Changes(0, "torch's own")
        return choose_native(graph, native_kernels())


def native_kernels() -> dict[OpOverload, OpOverload]:
    """The C++ ops by those that they stand for."""
    ops = torch.ops.speccompile
    processors = [*PROCESSORS, *registered_processors()]
    filters = {item.op: item.native_op for item in processors if isinstance(item, ThresholdProcessor)}
    return {ops.choose.default: ops.native_choose.default, **filters}

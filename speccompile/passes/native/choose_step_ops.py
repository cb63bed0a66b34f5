"""Which kernels commit, and read the text that drafts are looked up in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.ngram import TREE as NGRAM_TREE
from speccompile.ops.prediction import NAME as PREDICTION
from speccompile.ops.suffix import SCHEMAS
from speccompile.ops.suffix import TREE as SUFFIX_TREE
from speccompile.ops.tree import SCHEMAS as TREE_SCHEMAS
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.native.choose_native import choose_native


@dataclass(frozen=True)
class _ChooseNative(Pass):
    """The C++ forms of ``ops``, which do the same."""

    ops: ClassVar[tuple[str, ...]]
    # Not every chunk of a prompt commits, and most drafters are plain PyTorch.
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        ops = torch.ops.speccompile
        native = {getattr(ops, name).default: getattr(ops, f"native_{name}").default for name in self.ops}
        return choose_native(graph, native)


@dataclass(frozen=True)
class ChooseCommit(_ChooseNative):
    """Commit by the C++ op."""

    name: ClassVar[str] = "choose_commit"
    looks_for: ClassVar[str] = "the op that commits"
    region: ClassVar[PassRegion] = "commit"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("commit_chosen")
    ops: ClassVar[tuple[str, ...]] = ("accept_commit_",)


@dataclass(frozen=True)
class ChooseTreeOps(_ChooseNative):
    """The C++ ops of trees."""

    name: ClassVar[str] = "choose_tree_ops"
    looks_for: ClassVar[str] = "an op of trees"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("tree")
    provides: ClassVar[Facts] = facts("tree_ops_chosen")
    ops: ClassVar[tuple[str, ...]] = (*TREE_SCHEMAS, "likeliest")


@dataclass(frozen=True)
class ChooseDrafting(_ChooseNative):
    """The C++ ops of drafters that have some."""

    name: ClassVar[str] = "choose_drafting"
    looks_for: ClassVar[str] = "an op of a drafter"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("proposed")
    provides: ClassVar[Facts] = facts("drafting_chosen")
    ops: ClassVar[tuple[str, ...]] = ("match_ngram", NGRAM_TREE, PREDICTION, *SCHEMAS, SUFFIX_TREE)

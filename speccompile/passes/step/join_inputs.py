"""The tokens that a step's target reads, computed by one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the op
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import STORED
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import PROPOSED, LimitDrafts, NoDrafts, ReadDrafts
from speccompile.passes.step.verify_inputs import VerifyInputs

_NAMES = ("drafts", "row_draft_lens", "input_tokens", "positions")
_PASSES = frozenset({NoDrafts.name, ReadDrafts.name, LimitDrafts.name, VerifyInputs.name})


@dataclass(frozen=True)
class JoinInputs(Pass):
    """Replaces the ops that :class:`VerifyInputs`, and before it :class:`NoDrafts`, :class:`ReadDrafts` and
    :class:`LimitDrafts`, have inserted by a call of ``speccompile::step_inputs``.

    It finds the ops by the pass that inserted them, so it changes nothing where a user's pass may have changed one of
    them. If another pass has changed the drafts in between, the op reads the changed drafts.
    """

    name: ClassVar[str] = "join_inputs"
    looks_for: ClassVar[str] = "tokens to read that come from state"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("target_inputs", "committed")
    provides: ClassVar[Facts] = facts("inputs_joined")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        results = [graph.values[name] for name in _NAMES]
        replaced = _computing(graph, results)
        passes = {node.meta["pass"] for node in replaced}
        first = next((node for node in replaced if node.meta["pass"] == VerifyInputs.name), None)
        if first is None or not _is_closed(graph, replaced, results, first):
            return Changes(0, "other passes read what is computed on the way")
        given = _given(graph, replaced)
        drafts = None if NoDrafts.name in passes else given.get(2, graph.values["drafts"])
        lens = None if drafts is None else given.get(1, graph.values["row_draft_lens"])
        limit = graph.state("limit") if ReadDrafts.name in passes else None
        if limit is not None:
            read = {node.name for item in replaced for node in item.all_input_nodes}
            drafts, lens = (graph.state(name) for name in (STORED if read.issuperset(STORED) else PROPOSED))
        draft_limit = graph.state("draft_limit") if LimitDrafts.name in passes else None
        state = [graph.state(name) for name in ("tokens", "length")]
        optional = {"drafts": drafts, "draft_lens": lens, "limit": limit, "draft_limit": draft_limit}
        present = {name: node for name, node in optional.items() if node is not None}
        new = graph.insert(
            step_inputs,
            *state,
            graph.values["slots"],
            *present.values(),
            before=first,
            names=tuple(present),
            draft_len=int(results[0].meta["val"].shape[1]),
            width=int(results[2].meta["val"].shape[1]),
            vocab_size=graph.layout.vocab_size,
        )
        for old, node in zip(results, new, strict=True):
            if old in replaced:
                graph.replace(old, node)
        for node in reversed(replaced):
            if node not in results:
                graph.graph.erase_node(node)
        return Changes(1, f"one op in the place of {len(replaced)}")


def _computing(graph: StepGraph, results: list[fx.Node]) -> list[fx.Node]:
    """Nodes by which passes of :data:`_PASSES` compute ``results``, in order."""
    found: set[fx.Node] = set()
    stack = list(results)
    while stack:
        node = stack.pop()
        if node not in found and node.meta.get("pass") in _PASSES:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return [node for node in graph.graph.nodes if node in found]


def _is_closed(graph: StepGraph, replaced: list[fx.Node], results: list[fx.Node], first: fx.Node) -> bool:
    """Whether other nodes read only ``results`` of ``replaced``, and read them only from ``first`` on."""
    inside, before = set(replaced), set[fx.Node]()
    for node in graph.graph.nodes:
        if node is first:
            break
        before.add(node)
    others = ((node, user) for node in replaced for user in node.users if user not in inside)
    return all(node in results and user not in before for node, user in others)


def _given(graph: StepGraph, replaced: list[fx.Node]) -> dict[int, fx.Node]:
    """Nodes of other passes that ``replaced`` read, by the number of dimensions: drafts ``[B, K]``, and how many of
    them are valid, ``[B]``.
    """
    inside = {*replaced, graph.values["slots"], *graph.placeholders}
    return {node.meta["val"].ndim: node for item in replaced for node in item.all_input_nodes if node not in inside}


def step_inputs(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    *optional: torch.Tensor,
    names: tuple[str, ...],
    draft_len: int,
    width: int,
    vocab_size: int,
) -> tuple[torch.Tensor, ...]:
    """The op, whose ``optional`` tensors have these ``names``."""
    given = dict(zip(names, optional, strict=True))
    tensors = [given.get(name) for name in ("drafts", "draft_lens", "limit", "draft_limit")]
    results: tuple[torch.Tensor, ...] = torch.ops.speccompile.step_inputs(
        tokens, length, slots, *tensors, draft_len, width, vocab_size
    )
    return results

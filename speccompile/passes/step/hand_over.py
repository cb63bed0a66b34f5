"""Drafts that pass through the arena, from a drafter's executable to the target's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.nn.functional import one_hot

from speccompile.errors import UndeclaredDraftProbs
from speccompile.graph.state import K, N, StateSpec, V
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import STORED, Tree
from speccompile.ops.draft_rows import form_of, rows_of, store_chain_
from speccompile.ops.proposals import proposed_or_stored
from speccompile.ops.stored_trees import chain_parents, proposed_or_stored_tree, store_tree_, stored_tree
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.drafts import PROPOSED, ReadDrafts, proposed_drafts, set_drafts
from speccompile.passes.step.tree_drafts import fitting, set_tree

#: State of trees, int64 ``[N, K]``: parents and depths of the stored drafts. They are in the form of the tier.
STORED_TREE = ("stored_parents", "stored_depths")
#: State ``[N, K, V]``, float32; in a step's graph ``draft_probs`` are its rows'.
PROBABILITIES = "stored_draft_probs"


def hand_over_state(tiers: Sequence[int], *, probabilities: bool) -> list[StateSpec]:
    """State in which the drafts of each slot wait for the target's executable.

    Args:
        tiers: shapes of drafts.
        probabilities: what drafts were drawn from is stored, too.
    """
    i64, (drafts, lens) = torch.int64, STORED
    trees = any(isinstance(shape, Tree) for shape in tiers)
    return [
        StateSpec(drafts, (N, K), i64, low=0, high=2),
        StateSpec(lens, (N,), i64, high=K + 1),
        *[StateSpec(name, (N, K), i64, low=0, high=1) for name in STORED_TREE if trees],
        *[StateSpec(PROBABILITIES, (N, K, V), torch.float32)] * probabilities,
    ]


@dataclass(frozen=True)
class StoreDrafts(Pass):
    """Stores what drafting has named: drafts and their lengths, and, if it named any, parents and depths of a tree and
    the probabilities that drafts were drawn from.

    Args:
        begin: drafts that are stored already.
        mode: the name of the mode, for an error.
    """

    begin: int = 0
    mode: str = ""

    name: ClassVar[str] = "store_drafts"
    looks_for: ClassVar[str] = "drafts"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows", "drafts")
    provides: ClassVar[Facts] = facts("drafts_stored")

    def run(self, graph: StepGraph) -> Changes:
        values, start = graph.values, graph.anchors.start
        drafts, lens = (graph.state(name) for name in STORED)
        if "tree" in graph.facts:
            given = [values[name] for name in ("slots", "drafts", "parents", "depths", "row_draft_lens")]
            state = [drafts, *(graph.state(name) for name in STORED_TREE), lens]
            graph.insert(form_of(store_tree_, graph.facts), *state, *given, before=start)
            if "draft_probs" in values:
                probs = (values["draft_probs"], self._probabilities(graph))
                graph.insert(store, values["slots"], *probs, before=start)
            return Changes(len(state) + ("draft_probs" in values))
        kept = {"drafts": drafts, "row_draft_lens": lens}
        if "draft_probs" in values:
            kept["draft_probs"] = self._probabilities(graph)
        given = [values[name] for name in kept]
        if len(kept) == 2:
            function = form_of(store_chain_, graph.facts)
            graph.insert(function, drafts, lens, values["slots"], *given, before=start, begin=self.begin)
        else:
            graph.insert(store, values["slots"], *given, *kept.values(), before=start, begin=self.begin)
        return Changes(len(kept))

    def _probabilities(self, graph: StepGraph) -> fx.Node:
        if PROBABILITIES not in graph.layout.tensors:
            raise UndeclaredDraftProbs(mode=self.mode)
        return graph.state(PROBABILITIES)


@dataclass(frozen=True)
class ReadStored(Pass):
    """Reads a chain that :class:`StoreDrafts` has stored, with more than the drafts themselves.

    Args:
        probabilities: also what the drafts were drawn from; a proposal is certain of its drafts.
        proposals: a row's proposal (of a ready drafter) comes first, where it has one.
    """

    shape: int
    probabilities: bool = False
    proposals: bool = False

    name: ClassVar[str] = "read_stored"
    looks_for: ClassVar[str] = "what the drafter's executable stored"
    region: ClassVar[PassRegion] = "draft"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts")

    def run(self, graph: StepGraph) -> Changes:
        slots, start = graph.values["slots"], graph.anchors.start
        if self.proposals and not self.probabilities:
            state = [graph.state(name) for name in (*PROPOSED, *STORED, "length", "limit")]
            function = form_of(proposed_or_stored, graph.facts)
            set_drafts(graph, *graph.insert(function, *state, slots, before=start, draft_len=self.shape))
            return Changes(1, f"up to {self.shape} draft tokens from state")
        names = [*STORED, PROBABILITIES, "length", "limit", *PROPOSED * self.proposals]
        state = [graph.state(name) for name in names]
        drafts, lens, drawn_from = graph.insert(stored_chain, slots, *state, before=start, draft_len=self.shape)
        set_drafts(graph, drafts, lens)
        graph.name_value("draft_probs", drawn_from)
        return Changes(1, f"up to {self.shape} draft tokens from state")


@dataclass(frozen=True)
class ReadStoredTree(ReadStored):
    """Reads a tree that :class:`StoreDrafts` has stored in a step of the same shape. A proposal is a tree of one
    branch, without the drafts that are deeper than the shape."""

    named_values: ClassVar[tuple[str, ...]] = ("parents", "depths")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        assert isinstance(self.shape, Tree)
        drafts, lens = STORED
        stored = [graph.state(name) for name in (drafts, *STORED_TREE, lens)]
        slots, start = graph.values["slots"], graph.anchors.start
        found = graph.insert(form_of(stored_tree, graph.facts), *stored, slots, before=start, nodes=int(self.shape))
        if self.proposals:
            found = self._proposed_or(graph, found)
        set_tree(graph, *found)
        if self.probabilities:
            proposed = [graph.state(PROPOSED[1])] if self.proposals else []
            given = (graph.state(PROBABILITIES), slots, graph.values["drafts"], *proposed)
            graph.name_value("draft_probs", graph.insert(stored_tree_probs, *given, before=start))
        return Changes(1, str(self.shape))

    def _proposed_or(self, graph: StepGraph, stored: Sequence[fx.Node]) -> Sequence[fx.Node]:
        """A row's proposal where it has one, else its ``stored`` tree."""
        slots, start, facts = graph.values["slots"], graph.anchors.start, graph.facts
        tokens, lens, length, limit = (graph.state(name) for name in (*PROPOSED, "length", "limit"))
        longest = tokens.meta["val"].shape[1]
        # Of two equal lists of proposals.
        state = (tokens, lens, tokens, lens, length, limit, slots)
        chain = graph.insert(form_of(proposed_or_stored, facts), *state, before=start, draft_len=longest)
        parents = graph.insert(form_of(chain_parents, facts), chain[1], before=start, width=longest)
        most = graph.insert(form_of(rows_of, facts), graph.state("draft_limit"), slots, before=start)
        fitted = graph.insert(fitting, chain[0], parents, chain[1], most, before=start, tree=self.shape)
        either: Sequence[fx.Node] = graph.insert(
            form_of(proposed_or_stored_tree, facts), lens, slots, *fitted, *stored, before=start
        )
        return either


def read_stored(shape: int, *, probabilities: bool = False, proposals: bool = False) -> Pass:
    """The pass for drafts of that shape. A chain by itself is read as a proposal is."""
    if isinstance(shape, Tree):
        return ReadStoredTree(shape, probabilities, proposals)
    return ReadStored(shape, probabilities, proposals) if probabilities or proposals else ReadDrafts(shape, STORED)


def store(slots: torch.Tensor, *tensors: torch.Tensor, begin: int = 0) -> None:
    """Write values of rows, ``[B, ...]``, to state ``[N, ...]`` from index ``begin`` on: of ``tensors`` the first half
    into the second."""
    half = len(tensors) // 2
    for value, state in zip(tensors[:half], tensors[half:], strict=True):
        if value.ndim == 1:
            state.index_put_((slots,), value)
        else:
            places = torch.arange(begin, begin + value.shape[1], device=slots.device)
            state.index_put_((slots[:, None], places), value)


def stored_chain(
    slots: torch.Tensor,
    stored_drafts: torch.Tensor,
    stored_lens: torch.Tensor,
    stored_probs: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    *proposals: torch.Tensor,
    draft_len: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts ``[B, K]``, -1 after a row's own draft length, those lengths ``[B]``, and the distributions that they were
    drawn from, ``[B, K, V]``.

    Args:
        slots: ``[B]``; the other tensors ``[N]``, ``[N, Kmax]`` or ``[N, Kmax, V]``.
        proposals: drafts of ready drafters and their lengths, which are preferred to stored ones; empty without them.
    """
    found = proposed_drafts(stored_drafts, stored_lens, length, limit, slots, draft_len=draft_len)
    drawn_from = stored_probs[slots, :draft_len]
    if not proposals:
        return *found, drawn_from
    draft_tokens, draft_lens = proposals
    proposed, lens = proposed_drafts(draft_tokens, draft_lens, length, limit, slots, draft_len=draft_len)
    has_proposal = (draft_lens[slots] > 0)[:, None]
    return (
        torch.where(has_proposal, proposed, found[0]),
        torch.where(has_proposal[:, 0], lens, found[1]),
        torch.where(has_proposal[:, :, None], certain(proposed, vocab=drawn_from.shape[-1]), drawn_from),
    )


def certain(drafts: torch.Tensor, *, vocab: int) -> torch.Tensor:
    """float32 ``[B, K, V]``: the probability 1 of each of ``drafts`` ``[B, K]``."""
    return one_hot(drafts.clamp(0, vocab - 1), vocab).to(torch.float32)


def stored_tree_probs(
    stored_probs: torch.Tensor, slots: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor | None = None
) -> torch.Tensor:
    """The distributions ``[B, nodes, V]`` that the siblings of a stored tree's ``drafts`` ``[B, nodes]`` were drawn
    from.

    Args:
        stored_probs: ``[N, Kmax, V]``; slots: ``[B]``.
        draft_lens: ``[N]``, the lengths of proposals of ready drafters, which are preferred to stored trees.
    """
    drawn_from = stored_probs[slots, : drafts.shape[1]]
    if draft_lens is None:
        return drawn_from
    has_proposal = (draft_lens[slots] > 0)[:, None, None]
    return torch.where(has_proposal, certain(drafts, vocab=drawn_from.shape[-1]), drawn_from)

"""``mode=["suffix", "eagle3_one_model"]``: of each row a confident lookup drafts, and a network elsewhere.

The network is kept warm by every step, as always. It drafts in an executable of its own before the step, which runs
only where some row's lookup found nothing good enough.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from transformers import PreTrainedModel

from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import Tree
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.modes.base import Mode
from speccompile.modes.composed import Composed
from speccompile.modes.network.draft_network import DraftNetwork
from speccompile.modes.network.network_mode import NetworkMode
from speccompile.modes.network.split import PROBABILITIES, StoreDrafts, of_rows
from speccompile.modes.network.split_tree import STORED, StoreTree, stored_tree, stored_tree_state
from speccompile.modes.ready_mode import ReadyMode
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.step.drafts import proposed_drafts, set_drafts
from speccompile.passes.step.tree_drafts import fit, set_tree

#: Where the network's drafts wait for the step, beside the lookups' own.
NETWORK_DRAFTS = ("network_tokens", "network_lens")


@dataclass(frozen=True)
class ReadFirstDrafts(Pass):
    """Takes a row's lookup, and what the network's executable left where there is none.

    Args:
        probabilities: also what they were drawn from; a lookup is certain of its drafts.
    """

    draft_len: int
    probabilities: bool = False

    name: ClassVar[str] = "read_first_drafts"
    looks_for: ClassVar[str] = "lookups, and what the network's executable left"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts")

    def run(self, graph: StepGraph) -> Changes:
        names = (
            "draft_tokens",
            "draft_lens",
            *NETWORK_DRAFTS,
            "length",
            "limit",
            *[PROBABILITIES] * self.probabilities,
        )
        drafts, lens, *drawn_from = graph.insert(
            first_drafts,
            graph.values["slots"],
            *[graph.state(name) for name in names],
            before=graph.anchors.start,
            draft_len=self.draft_len,
        )
        set_drafts(graph, drafts, lens)
        for node in drawn_from:
            graph.name_value("draft_probs", node)
        return Changes(1, f"up to {self.draft_len} draft tokens from state")


def first_drafts(
    slots: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    network_tokens: torch.Tensor,
    network_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    *stored_probs: torch.Tensor,
    draft_len: int,
) -> tuple[torch.Tensor, ...]:
    """Drafts ``[B, K]``, -1 after a row's own draft length, those lengths ``[B]``, and, of ``stored_probs`` ``[N, Kmax,
    V]``, the distributions ``[B, K, V]``.

    Args:
        slots: ``[B]``; the other tensors ``[N]`` or ``[N, Kmax]``.
    """
    by_lookup, lookup_lens = proposed_drafts(draft_tokens, draft_lens, length, limit, slots, draft_len=draft_len)
    by_network, lens = proposed_drafts(network_tokens, network_lens, length, limit, slots, draft_len=draft_len)
    found = (draft_lens[slots] > 0)[:, None]
    chosen = torch.where(found, by_lookup, by_network), torch.where(found[:, 0], lookup_lens, lens)
    if not stored_probs:
        return chosen
    drawn_from = of_rows(stored_probs[0], slots, draft_len=draft_len)
    certain = torch.nn.functional.one_hot(by_lookup.clamp(min=0), drawn_from.shape[-1]).to(drawn_from.dtype)
    return *chosen, torch.where(found[:, :, None], certain, drawn_from)


@dataclass(frozen=True)
class ReadFirstTree(Pass):
    """Takes a row's lookup as a tree of one branch, and the network's tree where there is none. Drafts deeper than
    ``tree`` are left out."""

    tree: Tree

    name: ClassVar[str] = "read_first_tree"
    looks_for: ClassVar[str] = "lookups, and what the network's executable left"
    requires: ClassVar[Facts] = facts("rows")
    provides: ClassVar[Facts] = facts("drafts", "drafts_limited", "tree")

    def run(self, graph: StepGraph) -> Changes:
        names = ("draft_tokens", "draft_lens", "length", "limit", "draft_limit", *STORED)
        state = [graph.state(name) for name in names]
        start = graph.anchors.start
        set_tree(graph, *graph.insert(first_trees, graph.values["slots"], *state, before=start, tree=self.tree))
        return Changes(1, str(self.tree))


def first_trees(
    slots: torch.Tensor,
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    draft_limit: torch.Tensor,
    *stored: torch.Tensor,
    tree: Tree,
) -> tuple[torch.Tensor, ...]:
    """A step's tree, see :func:`speccompile.ops.tree.fit_tree`; slots are ``[B]``, the other tensors ``[N]`` or ``[N,
    Kmax]``."""
    longest = draft_tokens.shape[1]
    lookup, lens = proposed_drafts(draft_tokens, draft_lens, length, limit, slots, draft_len=longest)
    one_branch = torch.arange(longest, device=slots.device).expand(lookup.shape)
    by_lookup = fit(tree, lookup, one_branch, lens, draft_limit[slots])
    by_network = stored_tree(slots, *stored, nodes=int(tree))
    # Where neither has drafted, as in rows that hold no request, what is stored may be no tree.
    network = ((draft_lens[slots] == 0) & (by_network[3] > 0))[:, None]
    chosen = [torch.where(network, other, one) for one, other in zip(by_lookup[:3], by_network[:3], strict=True)]
    return *chosen, torch.where(network[:, 0], by_network[3], by_lookup[3])


@dataclass(frozen=True)
class LookupFirst(Mode):
    """Lookups, and a network for rows without one.

    Args:
        lookups: of which a draft passes as in :class:`~speccompile.modes.composed.Composed`, the last one's too.
        network_mode: drafts elsewhere.
    """

    lookups: Composed
    network_mode: NetworkMode

    name: ClassVar[str] = "lookup_first"
    ready: ClassVar[bool] = True
    network_on_demand: ClassVar[bool] = True

    @property
    def drafter_names(self) -> tuple[str, ...]:
        return (*self.lookups.drafter_names, self.network_mode.name)

    @property
    def draft_probs(self) -> bool:  # type: ignore[override]
        return self.network_mode.draft_probs

    @property
    def devices(self) -> tuple[str, ...]:  # type: ignore[override]
        return tuple(device for device in self.network_mode.devices if device in self.lookups.devices)

    @property
    def rounded_by(self) -> str:  # type: ignore[override]
        return self.network_mode.rounded_by

    @property
    def goals(self) -> Facts:  # type: ignore[override]
        return self.lookups.goals | self.network_mode.goals

    @property
    def split(self) -> bool:
        return True

    @property
    def most_drafts(self) -> int | None:
        return self.network_mode.most_drafts

    @property
    def learns_from(self) -> tuple[int, ...] | None:
        return self.network_mode.learns_from

    def check(self, info: ModelInfo) -> None:
        self.lookups.check(info)
        self.network_mode.check(info)

    def loaded(self, model: PreTrainedModel) -> LookupFirst:
        loaded = self.network_mode.loaded(model)
        assert isinstance(loaded, NetworkMode)
        return replace(self, network_mode=loaded)

    def network(self, model: PreTrainedModel, info: ModelInfo, max_len: int) -> DraftNetwork | None:
        return self.network_mode.network(model, info, max_len)

    def state(self) -> list[StateSpec]:
        i64, (tokens, lens) = torch.int64, NETWORK_DRAFTS
        own = [StateSpec(tokens, (N, K), i64, low=0, high=2), StateSpec(lens, (N,), i64, high=K + 1)]
        return [*self.lookups.state(), *self.network_mode.state(), *own]

    def draft_passes(self, draft_len: int) -> list[Pass]:
        return self.read_passes(draft_len, probabilities=False)

    def read_passes(self, draft_len: int, *, probabilities: bool) -> list[Pass]:
        return [ReadFirstDrafts(draft_len, probabilities)]

    def drafter_passes(self, draft_len: int, *, draws: bool, probabilities: bool) -> list[Pass]:
        if not draft_len:
            return []
        mode = self.network_mode
        drafts = mode.draft_passes(draft_len)
        if draws:
            drafts = mode.sampled_draft_passes(draft_len, probabilities=probabilities)
        return [*drafts, StoreDrafts(probabilities, *NETWORK_DRAFTS)]

    @property
    def drafts_trees(self) -> bool:  # type: ignore[override]
        return self.network_mode.drafts_trees

    @property
    def drafts_chains_alone(self) -> str:
        return self.network_mode.drafts_chains_alone

    def tree_state(self) -> list[StateSpec]:
        return stored_tree_state()

    def tree_read_passes(self, tree: Tree) -> list[Pass]:
        return [ReadFirstTree(tree)]

    def tree_drafter_passes(self, tree: Tree, *, draws: bool) -> list[Pass]:
        return [*self.network_mode.tree_draft_passes(tree, draws=draws), StoreTree()]

    def mark_passes(self) -> list[Pass]:
        return self.network_mode.mark_passes()

    def commit_passes(self) -> list[Pass]:
        return [*self.network_mode.commit_passes(), *self.lookups.commit_passes()]

    def explain(self) -> str:
        return f"{self.lookups.explain()}; elsewhere {self.network_mode.explain()}"


def lookup_first(lookups: tuple[ReadyMode, ...], network_mode: NetworkMode, **options: Any) -> LookupFirst:
    """The composition.

    Args:
        options: of :class:`~speccompile.modes.composed.Composed`.
    """
    # Every step keeps the network warm. Drafting is in separate executables.
    if "fused" in network_mode.options():
        network_mode = replace(network_mode, fused=True)  # type: ignore[call-arg]
    return LookupFirst(Composed(lookups, last_always=False, **options), network_mode)

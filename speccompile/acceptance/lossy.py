"""Shared parts of the lossy rules, which accept drafts that the target would not have chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from speccompile.acceptance.kept_nodes import ProcessNodes, TreeKeep, logits_at, longest_path, usable
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.greedy_accept import name_judged
from speccompile.passes.step.sample import ProcessLogits, draw
from speccompile.utils.numbers import is_real

#: (scores [B, K+1, V], drafts [B, K], text [B, S], length [B], *own) -> whether each draft may be accepted, bool [B,
#: K]. ``own``: if a rule names state tensors, the rows' slots [B], followed by the whole state tensors.
Criterion = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class LossyAccept(Pass):
    """Accept drafts up to the first one that :attr:`criterion` rejects. The next token is the one that ``exact``
    chooses."""

    criterion: Criterion
    state: tuple[str, ...] = ()

    name: ClassVar[str] = "lossy_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted")
    looks_for: ClassVar[str] = "logits and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "drafts")
    provides: ClassVar[Facts] = facts("accepted")

    #: The name of the values that the criterion reads, and whether the target's own token is drawn from them.
    judged: ClassVar[str] = "logits"
    draws: ClassVar[bool] = False

    def run(self, graph: StepGraph) -> Changes:
        scores = graph.values[self.judged]
        drafts, lens, slots = (graph.values[name] for name in ("drafts", "row_draft_lens", "slots"))
        text, length = graph.insert(text_of, graph.state("tokens"), graph.state("length"), slots)
        own = [slots, *(graph.state(name) for name in self.state)] if self.state else []
        kept = graph.insert(self.criterion, scores, drafts, text, length, *own)
        if self.draws:
            noise = [graph.state(name) for name in ("temperature", "seed")]
            target = graph.insert(draw, scores, length, slots, *noise)
        else:
            target = graph.insert(torch.ops.speccompile.choose, scores)
        vocab = int(scores.meta["val"].shape[-1])
        target_tokens, accepted = graph.insert(accept_tolerated, target, drafts, lens, kept, vocab=vocab)
        return name_judged(graph, target_tokens, accepted)


@dataclass(frozen=True)
class LossyAcceptSampled(LossyAccept):
    """:class:`LossyAccept` for tokens that are drawn, from the processed scores."""

    name: ClassVar[str] = "lossy_accept_sampled"
    looks_for: ClassVar[str] = "scores and drafts"
    requires: ClassVar[Facts] = facts("scores", "drafts")

    judged: ClassVar[str] = "scores"
    draws: ClassVar[bool] = True


@dataclass(frozen=True)
class TreeLossyAccept(TreeKeep):
    """Accept the longest path of drafts that :attr:`criterion` keeps. A node's draft is judged by the scores of the
    node before it."""

    criterion: Criterion = field(kw_only=True)
    state: tuple[str, ...] = ()

    name: ClassVar[str] = "tree_lossy_accept"

    def path(
        self, graph: StepGraph, scores: fx.Node, target: fx.Node, text: fx.Node, length: fx.Node
    ) -> Sequence[fx.Node]:
        drafts, parents, depths, slots = (graph.values[name] for name in ("drafts", "parents", "depths", "slots"))
        own = [slots, *(graph.state(name) for name in self.state)] if self.state else []
        before = graph.insert(scores_before, scores, parents)
        kept = graph.insert(self.criterion, before, drafts, text, length, *own)
        given = (before, target, drafts, parents, depths, kept)
        found: Sequence[fx.Node] = graph.insert(longest_tolerated, *given, depth=self.tree.depth)
        return found


@dataclass(frozen=True)
class TreeLossyAcceptSampled(TreeLossyAccept):
    """:class:`TreeLossyAccept` for tokens that are drawn, from the processed scores."""

    name: ClassVar[str] = "tree_lossy_accept_sampled"
    requires: ClassVar[Facts] = facts("node_scores", "drafts", "tree")
    draws: ClassVar[bool] = True


def keep_passes(criterion: Criterion, form: StepForm, state: tuple[str, ...] = ()) -> list[Pass]:
    """The passes of a rule that accepts drafts by ``criterion``. The criterion receives the state tensors ``state``."""
    if form.tree is not None:
        if form.kind == "greedy":
            return [TreeLossyAccept(form.tree, criterion=criterion, state=state)]
        return [ProcessNodes(form.tree), TreeLossyAcceptSampled(form.tree, criterion=criterion, state=state)]
    if form.kind == "greedy":
        return [LossyAccept(criterion, state)]
    return [ProcessLogits(), LossyAcceptSampled(criterion, state)]


def text_of(tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The tokens and the lengths of the rows' sequences, int64 ``[B, S]`` and ``[B]``."""
    return tokens[slots], length[slots]


def accept_tolerated(
    target: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor, kept: torch.Tensor, *, vocab: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[B, K+1]`` and the numbers of accepted draft tokens ``[B]``.

    A row accepts the drafts before the first one that is not ``kept``, bool ``[B, K]``, or that has no ``target`` token
    (-1) at its position, ``[B, T]``, T > K.
    """
    count = drafts.shape[1]
    target = target[:, : count + 1]
    offered = (torch.arange(count, device=drafts.device) < draft_lens[:, None]) & (target[:, :count] >= 0)
    offered = offered & (drafts >= 0) & (drafts < vocab)
    accepted = (kept & offered).long().cumprod(1).sum(1)
    places = torch.arange(count + 1, device=drafts.device)
    return torch.where(places < accepted[:, None], F.pad(drafts, (0, 1)), target), accepted


def scores_before(scores: torch.Tensor, parents: torch.Tensor) -> torch.Tensor:
    """Scores ``[B, nodes, V]`` by which each node's draft is judged, those of its parent, of ``[B, T, V]``."""
    return logits_at(scores, parents[:, 1:])


def longest_tolerated(
    scores: torch.Tensor,
    target: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor,
    depths: torch.Tensor,
    kept: torch.Tensor,
    *,
    depth: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The longest path of drafts that are ``kept``, bool ``[B, nodes]``, and its number of drafts; see
    :func:`~speccompile.acceptance.kept_nodes.longest_path`.

    Args:
        scores: ``[B, nodes, V]``, of each node's parent; target: ``[B, T]``; drafts: ``[B, nodes]``; parents, depths:
            ``[B, T]``.
    """
    vocab = scores.shape[-1]
    own = scores.gather(-1, drafts.clamp(0, vocab - 1)[..., None])[..., 0]
    # Finite, since a draft of probability 0 may be kept, too.
    likelihood = (own.float() - scores.float().logsumexp(-1)).nan_to_num(-1e30, neginf=-1e30)
    offered = usable(drafts, parents, target, vocab)
    return longest_path(kept & offered, parents, depths, likelihood, depth=depth)


def number_problem(value: object, most: float) -> str | None:
    """The reason why ``value`` is not a number in 0 .. ``most``; None if it is."""
    if is_real(value) and 0 <= value <= most:
        return None
    return "it must be a number of at least 0" + ("" if most == float("inf") else f" and at most {most:g}")

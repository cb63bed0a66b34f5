"""Shared parts of the rules that accept drafts by random coins.

Letters: p, the target's probabilities; q, the drafter's. Coins are uniform in 0 .. 1. Each step draws its own coins and
its own noise for the residual distribution.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import fx

from speccompile.acceptance.base import Rule
from speccompile.errors import PassError
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.noise import COINS, RESIDUAL, coins, gumbel
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.greedy_accept import GreedyAccept, drafts_of, name_judged
from speccompile.passes.step.sample import ProcessLogits, probabilities

#: :meth:`CoinRule.judge`.
Judge = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class CoinRule(Rule):
    """A lossless rule that accepts drafts by coins if tokens are drawn. Greedy requests are decided by ``exact``."""

    lossless: ClassVar[bool] = True
    text_invariant: ClassVar[bool] = False
    uses_draft_probs: ClassVar[bool] = True

    @staticmethod
    @abstractmethod
    def judge(
        probs: torch.Tensor,
        drafts: torch.Tensor,
        draft_lens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        coins: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Decide how many drafts each row accepts, and from which mass the target's own token is drawn.

        Args:
            probs: p, ``[B, K+1, V]``; drafts: ``[B, K]``; draft_lens: ``[B]``.
            draft_probs: q, ``[B, K, V]``; None means q = 1 at each draft.
            coins: uniform numbers ``[B, K]``.

        Returns:
            The numbers of accepted draft tokens ``[B]``; and for each position of the step, ``[B, K+1, V]``, the mass
                (not normalised) that the target's own token is drawn from if it comes at that position.
        """

    def passes(self, form: StepForm) -> list[Pass]:
        if form.kind == "greedy":
            return [GreedyAccept()]
        return [ProcessLogits(), CoinAccept(self.judge, self.needs_draft_probs)]


@dataclass(frozen=True)
class CoinAccept(Pass):
    """Accept drafts and draw tokens by :attr:`judge`.

    The seed of a coin includes the sequence length at the start of the step. A later step that judges the same position
    again therefore draws another coin.
    """

    judge: Judge
    needs_draft_probs: bool = False

    name: ClassVar[str] = "coin_accept"
    named_values: ClassVar[tuple[str, ...]] = ("target_tokens", "row_accepted")
    looks_for: ClassVar[str] = "scores and drafts"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("scores", "drafts")
    provides: ClassVar[Facts] = facts("accepted")

    def run(self, graph: StepGraph) -> Changes:
        if self.needs_draft_probs and drafts_of(graph) and "draft_probs" not in graph.values:
            raise PassError(
                "the mode has draft_probs = True, but its drafting left no draft_probs in the graph: name "
                "them with graph.name_value('draft_probs', node), or choose acceptance='rejection'",
                name=self.name,
                missing="draft_probs",
            )
        names = ("scores", "drafts", "row_draft_lens", "slots")
        state = [graph.state(name) for name in ("length", "temperature", "seed")]
        probs: list[fx.Node] = [graph.values["draft_probs"]] if "draft_probs" in graph.values else []
        nodes = [*(graph.values[name] for name in names), *state, *probs]
        target_tokens, accepted = graph.insert(decide, *nodes, judge=self.judge)
        return name_judged(graph, target_tokens, accepted)


def decide(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    draft_lens: torch.Tensor,
    slots: torch.Tensor,
    length: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    draft_probs: torch.Tensor | None = None,
    *,
    judge: Judge,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens ``[B, K+1]``, -1 where no token can be chosen, and the numbers of accepted draft tokens ``[B]``.

    Args:
        scores: ``[B, T, V]`` with T > K; drafts: ``[B, K]``, -1 after a row's last draft; draft_lens, slots: ``[B]``.
        length, temperature, seed: ``[N]``.
        draft_probs: q, ``[B, K, V]``; None means q = 1 at each draft.
    """
    # T can exceed K + 1: a mode may draft fewer tokens than its tier verifies, such as ``none``.
    scores = scores[:, : drafts.shape[1] + 1]
    start = length[slots]
    positions = start[:, None] + torch.arange(scores.shape[1], device=scores.device)
    flips = coins(seed[slots], COINS, positions[:, : drafts.shape[1]], start)
    gumbels = gumbel(seed[slots], RESIDUAL, positions, scores.shape[-1], start)
    probs = probabilities(scores, temperature[slots])
    accepted, left = judge(probs, drafts, draft_lens, draft_probs, flips)
    chosen = (left.log() + gumbels).argmax(-1)
    chosen = torch.where(probs.isnan().any(-1), -1, chosen)
    places = torch.arange(scores.shape[1], device=drafts.device)
    return torch.where(places < accepted[:, None], F.pad(drafts, (0, 1)), chosen), accepted


def offered_mass(
    probs: torch.Tensor, drafts: torch.Tensor, draft_lens: torch.Tensor, draft_probs: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The valid drafts of each row, and their probabilities.

    A NaN in q is read as 0. A draft with q = 0 is not valid: the drafter could not draw any token there (q is NaN, or
    its whole vocabulary is forbidden), and accepting it would change the target's distribution.

    Returns:
        Whether each draft is valid, bool ``[B, K]``; the drafts' ids as indices for ``gather``, ``[B, K, 1]``; and q
            ``[B, K, V]``, 0 where no draft is valid.
    """
    count, vocab = drafts.shape[1], probs.shape[-1]
    ids = drafts.clamp(0, vocab - 1)[..., None]
    offered = (torch.arange(count, device=drafts.device) < draft_lens[:, None]) & (drafts >= 0) & (drafts < vocab)
    if draft_probs is None:
        mass = torch.zeros_like(probs[:, :count]).scatter(-1, ids, 1.0)
    else:
        mass = draft_probs.nan_to_num(0.0, 0.0, 0.0)
        offered = offered & (mass.gather(-1, ids)[..., 0] > 0)
    return offered, ids, mass * offered[..., None]

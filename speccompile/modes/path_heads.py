"""Heads without KV that draft one token after another: each reads the target's hidden state and the drafts before it.

The base class of the modes of MLP speculators and of Hydra heads. They propose when a step ends, chains and trees.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph.state import K, N, StateSpec
from speccompile.graph.step_form import StepForm
from speccompile.modes.base import Mode
from speccompile.modes.ready_mode import proposal_state
from speccompile.ops.draft_levels import choose_nodes, next_level, ranked
from speccompile.passes.base import Pass
from speccompile.passes.step.drafts import ReadDrafts
from speccompile.passes.step.propose_from_hidden import ProposeFromHidden, ProposeTreeFromHidden
from speccompile.passes.step.tap_hidden import Tap
from speccompile.passes.step.tree_drafts import ReadTree

#: The largest number of tokens after one token of a tree.
MOST_BRANCHES = 10


class PathHeads(nn.Module):
    """Heads that read the tokens of the path to a draft. Head k (from 0) drafts the token k + 1 places after the newest
    one.

    Attributes:
        count: the number of heads.
        hidden_size: M, the size of the hidden state that they read; vocab_size: V.
    """

    count: int
    hidden_size: int
    vocab_size: int

    @abstractmethod
    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """The state ``[B, 1, S]`` before the newest token, from the hidden state ``[B, M]`` that precedes it."""

    @abstractmethod
    def advance(self, index: int, state: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The state ``[B, n, S]`` after ``tokens``, int64 ``[B, n]``, and the logits of the next tokens, ``[B, n, V]``.

        Args:
            index: the head that drafts; state: ``[B, n, S]``, before the tokens.
        """

    def forward(self, hidden: torch.Tensor, newest: torch.Tensor, draft_len: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The likeliest chain after the ``newest`` token ``[B]``: tokens and log-probabilities, ``[B, draft_len]``."""
        state, token = self.begin(hidden), newest[:, None]
        tokens, chances = [], []
        for index in range(draft_len):
            state, logits = self.advance(index, state, token)
            best, token = logits.float().log_softmax(-1).max(-1)
            tokens.append(token)
            chances.append(best)
        return torch.cat(tokens, 1), torch.cat(chances, 1)


@dataclass(frozen=True)
class PathHeadsMode(Mode):
    """Drafts with :class:`PathHeads` when a step ends. K is at most the number of heads.

    Args:
        draft: the heads, in eval mode, in the target's dtype and on its device; or the folder or hub id of a
            checkpoint.
    """

    draft: Any = None

    ready: ClassVar[bool] = True
    drafts_from_hidden: ClassVar[bool] = True
    drafts_trees: ClassVar[bool] = True

    def check_heads(self, model: PreTrainedModel) -> None:
        """Check that heads which were given fit the target ``model``.

        Raises:
            InvalidHead: they are for another target, dtype or device, or in training mode.
        """
        heads, config = self.draft, model.config.get_text_config(decoder=True)
        weight = next(heads.parameters())
        sizes = (config.hidden_size, config.vocab_size)
        reason = ""
        if (heads.hidden_size, heads.vocab_size) != sizes:
            given = f"{heads.hidden_size}, {heads.vocab_size}"
            reason = f"it must have M, V = {sizes[0]}, {sizes[1]}, as the target, got {given}"
        elif (weight.dtype, weight.device) != (model.dtype, model.device):
            reason = f"it must be {model.dtype} on {model.device}, as the target, got {weight.dtype} on {weight.device}"
        elif heads.training:
            reason = "it is in training mode; call its eval()"
        if reason:
            raise InvalidHead(source="that was given", reason=reason)

    @property
    def most_drafts(self) -> int | None:
        return self.draft.count if isinstance(self.draft, PathHeads) else None

    @property
    def taps(self) -> tuple[Tap, ...]:
        return (Tap(-1, post_norm=True),)

    def state(self, tiers: Sequence[int]) -> list[StateSpec]:
        return [*proposal_state(tiers), StateSpec("draft_score", (N, K), torch.float32)]

    def drafting(self, form: StepForm) -> list[Pass]:
        return [ReadDrafts(form.drafts) if form.tree is None else ReadTree(form.tree)]

    def after_commit(self, form: StepForm) -> list[Pass]:
        name = self.name
        weights = tuple((f"{name}_{key.replace('.', '_')}", value) for key, value in self.draft.named_parameters())
        proposals: list[Pass] = [ProposeFromHidden(self.propose, weights=weights, scored=True)]
        if form.trees:
            proposals.append(ProposeTreeFromHidden(self.propose_tree, weights=weights))
        return proposals

    def propose(
        self, tokens: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor, draft_len: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose a chain for every row.

        Args:
            hidden: ``[B, M]``, the target's hidden state before the newest token.
            weights: the heads' parameters, as tensors of the graph.
            draft_len: Kmax.

        Returns:
            Draft tokens ``[B, Kmax]``, the number of valid ones ``[B]``, and for each the probability that it and all
                drafts before it are right, float32 ``[B, Kmax]``.
        """
        count = min(self.draft.count, draft_len)
        newest = newest_token(tokens, length)
        drafts, best = torch.func.functional_call(self.draft, self._named(weights), (hidden, newest, count))
        # If some tiers are trees, Kmax can exceed the number of heads.
        missing = (0, draft_len - count)
        return pad(drafts, missing), torch.full_like(length, count), pad(best.cumsum(1).exp(), missing)

    def propose_tree(
        self, tokens: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor, *weights: torch.Tensor, nodes: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Propose the likeliest tree: of each level the likeliest tokens are read next.

        See :meth:`speccompile.modes.ready_mode.ReadyMode.propose_tree`.
        """
        tree = _Tree(self.draft, nodes)
        found, parents = torch.func.functional_call(tree, self._named(weights, "heads."), (tokens, length, hidden))
        return found, parents, (found >= 0).long().cumprod(1).sum(1)

    def _named(self, weights: Sequence[torch.Tensor], prefix: str = "") -> dict[str, torch.Tensor]:
        names = (f"{prefix}{name}" for name, _ in self.draft.named_parameters())
        return dict(zip(names, weights, strict=True))


class _Tree(nn.Module):
    """The tree of up to ``nodes`` tokens that heads draft."""

    def __init__(self, heads: PathHeads, nodes: int) -> None:
        super().__init__()
        self.heads, self.nodes = heads, nodes

    def forward(
        self, tokens: torch.Tensor, length: torch.Tensor, hidden: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and parents, ``[B, nodes]``, the likeliest first, -1 for none."""
        nodes, heads = self.nodes, self.heads
        branches = min(MOST_BRANCHES, heads.vocab_size, nodes)
        levels = min(heads.count, nodes)
        state, read = heads.begin(hidden), newest_token(tokens, length)[:, None]
        above: torch.Tensor | None = None
        index: torch.Tensor | None = None
        proposed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        first = 0
        for level in range(levels):
            if level:
                count = min(-(-nodes // levels), proposed[-1][0].shape[1])
                given, ranks, _ = proposed[-1]
                read, above, index, came_from = choose_nodes(given, ranks, count, (), branches)
                rows = torch.arange(len(state), device=state.device)[:, None]
                state = state[rows, came_from]
                first = sum(part[0].shape[1] for part in proposed[:-1])
            state, logits = heads.advance(level, state, read)
            drafts, logprobs = torch.ops.speccompile.likeliest(logits, branches)
            proposed.append(next_level(drafts, logprobs, above, index, first))
        drafts, chances, parents = (torch.cat(part, 1) for part in zip(*proposed, strict=True))
        missing = (0, max(0, nodes - drafts.shape[1]))
        drafts = pad(torch.where(chances > float("-inf"), drafts, -1), missing, value=-1)
        chances, parents = pad(chances, missing, value=float("-inf")), pad(parents, missing)
        return ranked(drafts, chances, parents, nodes)


def newest_token(tokens: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """The newest token ``[B]`` of ``tokens`` ``[B, S]``, of which ``length`` ``[B]`` are valid."""
    return tokens.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0]

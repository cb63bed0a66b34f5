"""Ops that add drafts that a row's guide forces, and remove proposed ones that it forbids. They call the host after a
step has committed."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from speccompile.errors import InvalidGuide
from speccompile.ops.define import define
from speccompile.sampling.guide import GuideFollower, followers


def guide_drafts(
    draft_lens: torch.Tensor,
    draft_tokens: torch.Tensor,
    slots: torch.Tensor,
    limit: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    guide_number: torch.Tensor,
    draft_score: torch.Tensor | None = None,
) -> None:
    """Replace the drafts of the rows' ``slots`` ``[B]`` by the tokens that their guides force, unless the drafts
    continue these. Truncate other drafts before the first one that is not allowed.

    Args:
        draft_lens: ``[N]``; draft_tokens: ``[N, K]``; draft_score: ``[N, K]``, 1 for forced tokens.
        tokens: ``[N, S]``; length, limit, guide_number: ``[N]``.
    """
    numbers = guide_number[slots]
    if not numbers.any():
        return
    # By numpy: reading one number from a tensor is slower than llguidance.
    rows, lens, proposed, scores = slots.tolist(), draft_lens.numpy(), draft_tokens.numpy(), None
    if draft_score is not None:
        scores = draft_score.numpy()
    for row, follower in followers(numbers):
        slot = rows[row]
        committed, drafts = int(length[slot]), proposed[slot, : lens[slot]].tolist()
        most = min(proposed.shape[1], max(0, int(limit[slot]) - committed - 1))
        try:
            kept = follower.drafts(tokens[slot, :committed], drafts, most)
        except InvalidGuide:
            # The engine ends the request with its error after the step.
            kept = []
        if kept != drafts[: len(kept)]:
            proposed[slot, : len(kept)] = kept
            if scores is not None:
                scores[slot, : len(kept)] = 1.0
        lens[slot] = len(kept)


def truncate_trees(
    tree_tokens: torch.Tensor,
    tree_parents: torch.Tensor,
    tree_count: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    guide_number: torch.Tensor,
) -> None:
    """Remove tokens that are not allowed after their path from the proposed trees of the rows' ``slots`` ``[B]``.

    The other tokens keep their order and move to the front. Their parents are renumbered.

    Args:
        tree_tokens, tree_parents: ``[N, P]``; tree_count: ``[N]``; as for :func:`speccompile.ops.tree.fit_tree`.
        tokens: ``[N, S]``; length, guide_number: ``[N]``.
    """
    for row, follower in followers(guide_number[slots]):
        slot = int(slots[row])
        text, count = tokens[slot, : int(length[slot])], int(tree_count[slot])
        proposed = zip(tree_tokens[slot, :count].tolist(), tree_parents[slot, :count].tolist(), strict=True)
        try:
            kept = _allowed_nodes(follower, text, proposed)
        except InvalidGuide:
            # The engine ends the request with its error after the step.
            kept = []
        tree_count[slot] = len(kept)
        if kept:
            nodes = torch.tensor(kept)
            tree_tokens[slot, : len(kept)], tree_parents[slot, : len(kept)] = nodes[:, 0], nodes[:, 1]


def _allowed_nodes(
    follower: GuideFollower, text: torch.Tensor, proposed: Iterable[tuple[int, int]]
) -> list[tuple[int, int]]:
    """The nodes (token, parent) of ``proposed`` whose path is allowed, with the parents' new numbers."""
    # For each node that is kept: its number among them, and the drafts up to it.
    paths: dict[int, tuple[int, list[int]]] = {0: (0, [])}
    kept: list[tuple[int, int]] = []
    for node, (token, parent) in enumerate(proposed, 1):
        if parent not in paths:
            continue
        number, path = paths[parent]
        if follower.allowed(text, [*path, token]) == len(path) + 1:
            kept.append((token, number))
            paths[node] = len(kept), [*path, token]
    return kept


def _unchanged(*_: torch.Tensor) -> None:
    """On CUDA no guide is followed in steps: the host reads the drafts before each of them."""


define(
    "guide_drafts_(Tensor(a!) draft_lens, Tensor(b!) draft_tokens, Tensor slots, Tensor limit, Tensor tokens, "
    "Tensor length, Tensor guide_number, Tensor(c!)? draft_score=None) -> ()",
    None,
    guide_drafts,
    cuda=_unchanged,
)
define(
    "truncate_trees_(Tensor(a!) tree_tokens, Tensor(b!) tree_parents, Tensor(c!) tree_count, Tensor slots, "
    "Tensor tokens, Tensor length, Tensor guide_number) -> ()",
    None,
    truncate_trees,
    cuda=_unchanged,
)

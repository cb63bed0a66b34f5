"""Test of relaxed acceptance: whether a draft is almost as likely as the likeliest token."""

from __future__ import annotations

import torch

from speccompile.ops.define import define

_SCHEMA = "is_within_top(Tensor scores, Tensor drafts, Tensor allowed, int top_k) -> Tensor"


def reference(scores: torch.Tensor, drafts: torch.Tensor, allowed: torch.Tensor, top_k: int) -> torch.Tensor:
    """The definition: a draft is within the top if it is among the ``top_k`` most likely tokens of its place, and its
    probability is at most ``allowed`` below the greatest. A token of probability 0, such as a forbidden one, never is.

    Args:
        scores: ``[B, T, V]`` with T >= K, read only. Of equal ones the lower id is more likely.
        drafts: int64 ``[B, K]``. A value that is not a token id is never within the top.
        allowed: float32 ``[B]``. Below 0 no draft is within the top.

    Returns:
        bool ``[B, K]``; False where a place has a NaN.
    """
    scores, vocab = scores[:, : drafts.shape[1]].float(), scores.shape[-1]
    ids = drafts.clamp(0, vocab - 1)[..., None]
    own, probs = scores.gather(-1, ids), scores.softmax(-1)
    ahead = (scores > own) | ((scores == own) & (torch.arange(vocab, device=scores.device) < ids))
    own_prob = probs.gather(-1, ids)[..., 0]
    within = (own_prob >= probs.amax(-1) - allowed[:, None]) & (own_prob > 0)
    return within & (ahead.sum(-1) < top_k) & (drafts >= 0) & (drafts < vocab)


def _fake(scores: torch.Tensor, drafts: torch.Tensor, allowed: torch.Tensor, top_k: int) -> torch.Tensor:
    return drafts.new_empty(drafts.shape, dtype=torch.bool)


define(_SCHEMA, _fake, reference, cuda="within_top.is_within_top")

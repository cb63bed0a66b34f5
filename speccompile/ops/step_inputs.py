"""Drafts of a step and the tokens that its target reads, from state, as ONE op. On CUDA it is one launch,
and on a CPU it is C++ (``ops/cpu/csrc/base/ops/row_ops.cpp``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

_SCHEMA = (
    "step_inputs(Tensor tokens, Tensor length, Tensor slots, Tensor? drafts, Tensor? draft_lens, Tensor? limit, "
    "Tensor? draft_limit, int draft_len, int width, int vocab_size) -> (Tensor, Tensor, Tensor, Tensor)"
)


def reference(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor | None,
    draft_lens: torch.Tensor | None,
    limit: torch.Tensor | None,
    draft_limit: torch.Tensor | None,
    draft_len: int,
    width: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The newest committed token of each row, and its drafts.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``.
        drafts, draft_lens: int64 ``[B, K]`` and ``[B]``; with ``limit``, state ``[N, Kmax]`` and ``[N]``, of which a
            row has no more than it could emit. None: no drafts.
        limit: int64 ``[N]``, the longest sequence; draft_limit: int64 ``[N]``, the most drafts.
        draft_len: K; width: T, at least K+1.

    Returns:
        Drafts ``[B, K]``, -1 after a row's own draft length, and these lengths ``[B]``; tokens ``[B, T]`` to read,
        where a draft that is not a token is the newest one, and their positions ``[B, T]``.
    """
    row_length = length[slots]
    newest_at = (row_length - 1).clamp(min=0)
    newest = tokens[slots, newest_at][:, None]
    if drafts is None or draft_lens is None:
        own, lens = tokens.new_zeros((len(slots), 0)), torch.zeros_like(slots)
    elif limit is None:
        own, lens = drafts, draft_lens
    else:
        own = drafts[slots, :draft_len]
        lens = torch.minimum(draft_lens[slots].clamp(max=draft_len), limit[slots] - row_length - 1).clamp(min=0)
    if draft_limit is not None:
        lens = torch.minimum(lens, draft_limit[slots])
    own = torch.where(torch.arange(draft_len, device=tokens.device) < lens[:, None], own, -1)
    padded = F.pad(own, (0, width - 1 - draft_len), value=-1)
    read = torch.cat([newest, torch.where((padded < 0) | (padded >= vocab_size), newest, padded)], dim=1)
    return own, lens.clone(), read, newest_at[:, None] + torch.arange(width, device=tokens.device)


def newest_and_drafts(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    *,
    width: int,
    vocab_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and positions ``[B, T]`` of a verify step.

    Args:
        tokens: ``[N, S]``; length: ``[N]``; slots: ``[B]``; drafts: ``[B, K]``, -1 for no draft.
    """
    newest_at = (length[slots] - 1).clamp(min=0)
    newest = tokens[slots, newest_at]
    # Values that are not tokens (-1, padding, a drafter's mistake) are read as the newest token, whose logits the step
    # computes anyway: a NaN of another token would spoil the positions before it. Acceptance reads the drafts.
    drafts = F.pad(drafts, (0, width - 1 - drafts.shape[1]), value=-1)
    drafts = torch.where((drafts < 0) | (drafts >= vocab_size), newest[:, None], drafts)
    read = torch.cat([newest[:, None], drafts], dim=1)
    return read, newest_at[:, None] + torch.arange(width, device=tokens.device)


def _fake(tokens, length, slots, drafts, draft_lens, limit, draft_limit, draft_len, width, vocab_size):  # type: ignore[no-untyped-def]
    rows = slots.shape[0]
    sizes = ((rows, draft_len), (rows,), (rows, width), (rows, width))
    return tuple(tokens.new_empty(size) for size in sizes)


define(_SCHEMA, _fake, reference, cpp=BASE, recorded=True, cuda="step_inputs.step_inputs")

"""Acceptance and commit of a step as ONE op; :func:`commit` defines what it writes.

On a CPU the op is C++ (``ops/cpu/csrc/base/kernels/commit.cpp``).
"""

from __future__ import annotations

from typing import Any

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

#: Tensors of the op, in the order of its schema.
NAMES = (
    *("tokens", "length", "limit", "alive", "eos", "emitted", "accepted", "proposed"),
    *("slots", "target_tokens", "row_draft_lens", "row_accepted", "drafts", "ready"),
)

_SCHEMA = (
    "(Tensor(a!) tokens, Tensor(b!) length, Tensor limit, Tensor(c!) alive, Tensor eos, "
    "Tensor(d!) emitted, Tensor(e!) accepted, Tensor(f!) proposed, Tensor slots, Tensor target_tokens, "
    "Tensor row_draft_lens, Tensor? row_accepted, Tensor? drafts, Tensor? ready=None) -> ()"
)


def named(*arguments: torch.Tensor | None, **options: torch.Tensor | None) -> dict[str, Any]:
    """All tensors of a call by name."""
    return dict.fromkeys(NAMES) | dict(zip(NAMES, arguments, strict=False)) | options


def commit(
    tokens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    alive: torch.Tensor,
    eos: torch.Tensor,
    emitted: torch.Tensor,
    accepted: torch.Tensor,
    proposed: torch.Tensor,
    slots: torch.Tensor,
    target_tokens: torch.Tensor,
    row_accepted: torch.Tensor,
    row_draft_lens: torch.Tensor,
    ready: torch.Tensor | None = None,
) -> None:
    """Write a step's outcome into the state of its rows' slots.

    Args:
        tokens ``[N, S]``, length, limit, alive ``[N]``, eos ``[N, E]``, emitted, accepted, proposed ``[N]``: state.
        slots: ``[B]``; target_tokens: ``[B, K+1]``, -1 for no token; row_accepted, row_draft_lens: ``[B]``.
        ready: ``[B]``, False for rows that emit nothing yet (a prompt's chunk that is not its last).
    """
    row_length, row_alive = length[slots], alive[slots]
    acts = row_alive if ready is None else row_alive & ready
    width = target_tokens.shape[1]
    offsets = torch.arange(width, device=tokens.device)

    count = torch.minimum(row_accepted + 1, limit[slots] - row_length)
    is_eos = (target_tokens[:, :, None] == eos[slots][:, None, :]).any(-1) & (offsets < count[:, None])
    first_eos = torch.where(is_eos, offsets, width).amin(1)
    count = torch.minimum(count, first_eos + 1)
    first_undecided = torch.where(target_tokens < 0, offsets, width).amin(1)
    # A draft that is not a number spoils the places before it too: without drafts they may be sound.
    undecided = (first_undecided < count) & (row_draft_lens == 0)
    count = torch.where(acts, torch.minimum(count, first_undecided), 0)

    places = row_length[:, None] + offsets
    old = tokens[slots[:, None], places]
    new = torch.where(offsets < count[:, None], target_tokens, old)
    tokens.index_put_((slots[:, None], places), new)

    new_length = row_length + count
    ended = acts & ((first_eos < count) | (new_length >= limit[slots]) | undecided)
    length.index_put_((slots,), new_length)
    alive.index_put_((slots,), row_alive & ~ended)
    emitted.index_put_((slots,), count)
    accepted.index_put_((slots,), torch.minimum(row_accepted, count))
    proposed.index_put_((slots,), torch.where(acts, row_draft_lens, 0))


def reference(*arguments: torch.Tensor | None, **options: torch.Tensor | None) -> None:
    """Count accepted drafts as ``greedy_accept`` does, unless ``row_accepted`` is given, and then ``commit``.

    Args:
        arguments: those of :func:`commit`.
        row_accepted: int64 ``[B]``; None: the number of drafts before the first one that differs from the target.
        drafts: int64 ``[B, K]``, read only without ``row_accepted``.
    """
    call = named(*arguments, **options)
    drafts, target_tokens = call.pop("drafts"), call["target_tokens"]
    if call["row_accepted"] is None:
        count = drafts.shape[1]
        offered = torch.arange(count, device=drafts.device) < call["row_draft_lens"][:, None]
        agrees = (drafts == target_tokens[:, :count]) & offered
        call["row_accepted"] = agrees.long().cumprod(1).sum(1)
    commit(**call)


def _on_cuda(*arguments, **options):  # type: ignore[no-untyped-def]
    from speccompile.ops.triton.accept_commit import accept_commit

    accept_commit(named(*arguments, **options))


define("accept_commit_" + _SCHEMA, None, reference, cpp=BASE, recorded=True, cuda=_on_cuda)

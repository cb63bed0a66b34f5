"""Storing a ready drafter's proposal for the next step, as ONE op. On CUDA it is one launch, and on
a CPU it is C++ (``ops/cpu/csrc/base/ops/row_ops.cpp``)."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

_SCHEMA = (
    "store_drafts_(Tensor(a!) draft_tokens, Tensor(b!) draft_lens, Tensor length, Tensor limit, Tensor slots, "
    "Tensor drafts, Tensor lens) -> ()"
)


def reference(
    draft_tokens: torch.Tensor,
    draft_lens: torch.Tensor,
    length: torch.Tensor,
    limit: torch.Tensor,
    slots: torch.Tensor,
    drafts: torch.Tensor,
    lens: torch.Tensor,
) -> None:
    """Write the drafts of each row to its slot, and how many of them the next step could emit.

    Args:
        draft_tokens: int64 ``[N, Kmax]``, draft_lens: int64 ``[N]``: written.
        length, limit: int64 ``[N]``; slots: int64 ``[B]``.
        drafts: int64 ``[B, Kmax]``; lens: int64 ``[B]``, how many of these are valid.
    """
    draft_tokens.index_put_((slots,), drafts)
    useful = torch.minimum(lens.clamp(max=drafts.shape[1]), limit[slots] - length[slots] - 1).clamp(min=0)
    draft_lens.index_put_((slots,), useful)


define(_SCHEMA, None, reference, cpp=BASE, recorded=True, cuda="store_drafts.store_drafts")

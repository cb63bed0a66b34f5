"""A drafter with its own vocabulary, which is a part of the target's.

EAGLE-3's heads and what was made after them: ``d2t`` of a checkpoint has the offset of each draft token's id, so that
draft token i is the target's ``i + d2t[i]``.
"""

from __future__ import annotations

import torch

from speccompile.errors import InvalidInput


def check_d2t(d2t: torch.Tensor, vocab: int) -> None:
    """Asked when a checkpoint is read.

    Args:
        d2t: int64 ``[Vd]``.
        vocab: V, the target's.

    Raises:
        InvalidInput: a draft token is none of the target's, or two are the same.
    """
    if d2t.ndim != 1 or d2t.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(name="d2t", reason="it has to be a list of whole numbers, one for each draft token")
    ids = target_ids(d2t)
    outside = ((ids < 0) | (ids >= vocab)).nonzero().flatten()
    if len(outside):
        at = int(outside[0])
        reason = f"draft token {at} would be token {int(ids[at])} of the target, which has 0 .. {vocab - 1}"
        raise InvalidInput(name="d2t", reason=f"{reason}; is the head one of this target?")
    if len(ids.unique()) < len(ids):
        raise InvalidInput(name="d2t", reason="two draft tokens are the same token of the target")


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """The target's ids of all draft tokens, int64 ``[Vd]``."""
    return torch.arange(d2t.shape[0], device=d2t.device) + d2t

"""Forbids the tokens outside of a bit mask. On a CPU it is C++ (``ops/cpu/csrc/base/ops/allowed_ops.cpp``)."""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

#: Tokens of a byte of a mask.
BYTE = 8


def reference(scores: torch.Tensor, bits: torch.Tensor) -> None:
    """Set the scores of tokens whose bit is 0 to -inf, in place.

    Args:
        scores: ``[V]``, of a float dtype.
        bits: uint8 ``[ceil(V / 8)]``, a bit for each token, from the lowest one of a byte on.
    """
    ids = torch.arange(len(scores), device=scores.device)
    scores.masked_fill_(bits[ids // BYTE] >> (ids % BYTE) & 1 == 0, float("-inf"))


def _fake(scores, bits):  # type: ignore[no-untyped-def]
    return None


define("keep_allowed_(Tensor(a!) scores, Tensor bits) -> ()", _fake, reference, cpp=BASE)

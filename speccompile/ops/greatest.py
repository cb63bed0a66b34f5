"""Scans of scores that thresholds are computed with, and the mask of what is below one.

On a CPU they are C++ (``ops/cpu/csrc/base/ops/choose_ops.cpp``): a search for the greatest of many scores, where torch
sorts. ``greatest`` and ``mask_below_`` only compare. The share of the greatest score is a sum, whose last bits may
differ from torch's; :data:`speccompile.ops.tolerances.ROUNDING` covers that.
"""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define


def greatest(scores: torch.Tensor, count: int) -> torch.Tensor:
    """The ``count`` greatest of ``scores`` (float32 ``[B, T, V]``) in descending order, ``[B, T, count]``. A NaN is
    greater than all numbers."""
    return scores.topk(count, dim=-1).values


def greatest_share(scores: torch.Tensor) -> torch.Tensor:
    """The softmax of the greatest of ``scores`` (float32 ``[B, T, V]``), ``[B, T, 1]``; NaN where a score is NaN.

    The order of its sums depends only on V, not on the number of positions or threads: ``softmax`` has a fixed order,
    ``sum`` does not.
    """
    return scores.softmax(-1).amax(-1, keepdim=True)


def mask_below(scores: torch.Tensor, threshold: torch.Tensor) -> None:
    """Set scores (float32 ``[B, T, V]``) below ``threshold`` (float32 ``[B, T, 1]``) to -inf."""
    scores.masked_fill_(scores < threshold, float("-inf"))


def _fake(scores, count=1):  # type: ignore[no-untyped-def]
    return scores.new_empty((*scores.shape[:2], count))


define("greatest(Tensor scores, int count) -> Tensor", _fake, greatest, cpp=BASE)
define("greatest_share(Tensor scores) -> Tensor", _fake, greatest_share, cpp=BASE)
define("mask_below_(Tensor(a!) scores, Tensor threshold) -> ()", None, mask_below, cpp=BASE)

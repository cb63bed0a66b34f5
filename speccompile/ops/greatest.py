"""Scans of scores that thresholds are computed with, and the mask of what is below one.

On a CPU they are C++ (``ops/cpu/csrc/base/ops/choose_ops.cpp``): a search for the greatest of many scores, where torch
sorts. ``greatest`` and ``mask_below_`` only compare. The share of the greatest score is a sum, and thresholds are
computed with exponentials and logarithms. Their last bits may differ from torch's, which the tolerances of
:mod:`speccompile.ops.tolerances` cover.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.tolerances import MIN_P_ROUNDING, ROUNDING
from speccompile.utils.devices import traits_of

#: The nucleus is searched among so many of the greatest scores, then among more. 256 of 50,000 are found six times as
#: fast as 1,024, and a hundred times as fast as all are sorted.
SEARCH_SIZES = (256, 4096)


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


def top_p_threshold(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """The least of ``scores`` (float32 ``[B, T, V]``) that top-p keeps, ``[B, T, 1]``; -inf for a ``top_p`` (float32
    ``[B]``) of 1."""
    p = top_p[:, None, None]
    share = torch.ops.speccompile.greatest_share(scores)
    vocab = scores.shape[-1]
    # Whether the search may end early is read from the tensor, which only host memory allows within a step.
    for size in (*SEARCH_SIZES, vocab) if traits_of(scores.device).host_memory else (vocab,):
        values = torch.ops.speccompile.greatest(scores, min(size, vocab))
        mass = (values - values[..., :1]).exp() * share
        # A token stays if the tokens before it do not reach p.
        before = F.pad(mass.cumsum(-1)[..., :-1], (1, 0))
        inside = before < p - ROUNDING
        inside[..., 0] = True
        count = inside.sum(-1, keepdim=True)
        if size >= vocab or not ((count == size) & (p < 1)).any():
            break
    return torch.where(p < 1, values.gather(-1, count - 1), float("-inf"))


def min_p_threshold(scores: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """The least of ``scores`` (float32 ``[B, T, V]``) that min-p keeps, ``[B, T, 1]``; -inf for a ``min_p`` (float32
    ``[B]``) of 0."""
    greatest: torch.Tensor = torch.ops.speccompile.greatest(scores, 1)
    return greatest + min_p.log()[:, None, None] - MIN_P_ROUNDING


def _fake_threshold(scores, option):  # type: ignore[no-untyped-def]
    return scores.new_empty((*scores.shape[:2], 1))


def _fake(scores, count=1):  # type: ignore[no-untyped-def]
    return scores.new_empty((*scores.shape[:2], count))


define("greatest(Tensor scores, int count) -> Tensor", _fake, greatest, cpp=BASE)
define("greatest_share(Tensor scores) -> Tensor", _fake, greatest_share, cpp=BASE)
define("top_p_threshold(Tensor scores, Tensor top_p) -> Tensor", _fake_threshold, top_p_threshold, cpp=BASE)
define("min_p_threshold(Tensor scores, Tensor min_p) -> Tensor", _fake_threshold, min_p_threshold, cpp=BASE)
define("mask_below_(Tensor(a!) scores, Tensor threshold) -> ()", None, mask_below, cpp=BASE)

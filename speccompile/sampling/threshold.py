"""The base of top-k, top-p and min-p: scores below a threshold become -inf."""

from __future__ import annotations

from abc import abstractmethod

import torch

import speccompile.ops.greatest  # noqa: F401  defines the ops
from speccompile.sampling.base import Processor


class ThresholdProcessor(Processor):
    """A processor that removes the scores below a threshold."""

    @abstractmethod
    def threshold(self, scores: torch.Tensor, *state: torch.Tensor) -> torch.Tensor:
        """The least score that stays, float32 ``[B, T, 1]``, of ``scores`` ``[B, T, V]``."""

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        torch.ops.speccompile.mask_below_(scores, self.threshold(scores, *state))

"""The base of top-k, top-p and min-p: scores below a threshold become -inf."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

import speccompile.ops.native  # noqa: F401  defines ops
from speccompile.sampling.base import Processor, define_op
from speccompile.utils.torch_private import OpOverload


@dataclass(frozen=True)
class Scans:
    """Ops over the scores ``[B, T, V]`` that thresholds are computed with.

    Attributes:
        greatest: the greatest scores in descending order, ``[B, T, count]``.
        share: the softmax of the greatest one, ``[B, T, 1]``. The order of its sums depends on V, not on the
            number of positions or on threads.
    """

    greatest: Callable[[torch.Tensor, int], torch.Tensor]
    share: Callable[[torch.Tensor], torch.Tensor]


# softmax sums each row in a fixed order; torch.sum does not.
STOCK = Scans(lambda scores, count: scores.topk(count, dim=-1).values, lambda s: s.softmax(-1).amax(-1, keepdim=True))
NATIVE = Scans(torch.ops.speccompile.native_greatest, torch.ops.speccompile.native_greatest_share)


class ThresholdProcessor(Processor):
    """A processor with a second op, ``native_<name>_``, which uses C++ ops. Most of these only compare, so they are
    bit-equal to torch's; ``share`` may differ in the last bits."""

    @abstractmethod
    def threshold(self, scores: torch.Tensor, scans: Scans, *state: torch.Tensor) -> torch.Tensor:
        """The least score that stays, float32 ``[B, T, 1]``, of ``scores`` ``[B, T, V]``."""

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores.masked_fill_(scores < self.threshold(scores, STOCK, *state), float("-inf"))

    def native_call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        """The implementation of the native op. Arguments as of :meth:`call`."""
        if self.active(*state):
            torch.ops.speccompile.native_mask_below_(scores, self.threshold(scores, NATIVE, *state))

    @property
    def native_op(self) -> OpOverload:
        """The op of the processor's C++ form."""
        overload: OpOverload = getattr(torch.ops.speccompile, f"native_{self.name}_").default
        return overload

    def register(self) -> None:
        super().register()
        define_op(self, f"native_{self.name}_", "CPU", lambda processor: processor.native_call)

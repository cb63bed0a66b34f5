"""What top-k, top-p and min-p have in common: the scores from a threshold on stay."""

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
    """What may be asked about the scores ``[B, T, V]`` of each place.

    Attributes:
        greatest: so many of them, in descending order: ``[B, T, count]``.
        share: the softmax of the greatest, ``[B, T, 1]``, by sums whose order depends on V alone: not on how many
            places there are, nor on threads.
    """

    greatest: Callable[[torch.Tensor, int], torch.Tensor]
    share: Callable[[torch.Tensor], torch.Tensor]


# A row's softmax has an order of its own; a plain sum has not.
STOCK = Scans(lambda scores, count: scores.topk(count, dim=-1).values, lambda s: s.softmax(-1).amax(-1, keepdim=True))
NATIVE = Scans(torch.ops.speccompile.native_greatest, torch.ops.speccompile.native_greatest_share)


class KeepGreatest(Processor):
    """A processor with a second op, ``native_<name>_``, which does the same with C++ ops. Most only compare, and so
    agree with torch's in every bit; the share agrees but for its last ones."""

    @abstractmethod
    def threshold(self, scores: torch.Tensor, scans: Scans, *state: torch.Tensor) -> torch.Tensor:
        """What stays is not below it: float32 ``[B, T, 1]``, of ``scores`` ``[B, T, V]``."""

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
        """What the native op does: as :meth:`call`."""
        if self.active(*state):
            torch.ops.speccompile.native_mask_below_(scores, self.threshold(scores, NATIVE, *state))

    @property
    def native_op(self) -> OpOverload:
        overload: OpOverload = getattr(torch.ops.speccompile, f"native_{self.name}_").default
        return overload

    def register(self) -> None:
        super().register()
        define_op(self, f"native_{self.name}_", "CPU", lambda processor: processor.native_call)

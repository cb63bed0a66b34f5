"""What top-k, top-p and min-p have in common: the scores from a threshold on stay."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence

import torch

import speccompile.lowering.ops.native  # noqa: F401  defines ops
from speccompile.sampling.base import SCHEMA, Processor, library

#: (scores [B, T, V], count) -> the greatest of each place in descending order, [B, T, count]
Greatest = Callable[[torch.Tensor, int], torch.Tensor]


def stock_greatest(scores: torch.Tensor, count: int) -> torch.Tensor:
    return scores.topk(count, dim=-1).values


class KeepGreatest(Processor):
    """A processor with a second op, ``native_<name>_``, which does the same with C++ ops. These only compare, and so
    agree with torch's in every bit."""

    @abstractmethod
    def threshold(self, scores: torch.Tensor, greatest: Greatest, *state: torch.Tensor) -> torch.Tensor:
        """What stays is not below it: float32 ``[B, T, 1]``, of ``scores`` ``[B, T, V]``."""

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        scores.masked_fill_(scores < self.threshold(scores, stock_greatest, *state), float("-inf"))

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
            ops = torch.ops.speccompile
            ops.native_cut_below_(scores, self.threshold(scores, ops.native_greatest, *state))

    @property
    def native_op(self) -> torch._ops.OpOverload:
        overload: torch._ops.OpOverload = getattr(torch.ops.speccompile, f"native_{self.name}_").default
        return overload

    def register(self) -> None:
        super().register()
        name = f"native_{self.name}_"
        library.define(name + SCHEMA)
        library.impl(name, self.native_call, "CPU")
        torch.library.register_fake(f"speccompile::{name}", lambda *_: None, lib=library)

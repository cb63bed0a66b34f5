"""The arguments of the attention op, as one value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from speccompile.ops.kv_rows import features_of

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class AttentionCall:
    """Arguments in the order of the op's schema; ``speccompile.ops.attention.reference`` describes each of them."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    parents: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    alibi: bool = False

    @property
    def sizes(self) -> tuple[int, int, int, int, int, int, int]:
        """B, T, H, G, D, Dv and S."""
        rows, width, heads, dim = self.q.shape
        size, groups = self.v_cache.shape[1:3]
        value_dim = features_of(self.v_cache)
        capacity = size if self.pages is None else size * self.pages.shape[1]
        return rows, width, heads, groups, dim, value_dim, capacity

    def for_both(self) -> dict[str, Any]:
        """Arguments that the two kernels have in common."""
        return {
            "positions": self.positions,
            "parents": self.parents,
            "width": self.q.shape[1],
            "WINDOW": self.window,
            "CHUNK": self.chunk,
        }

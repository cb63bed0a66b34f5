"""Attention of a DFlash block: its queries attend to the context, and to all positions of the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

import speccompile.ops  # noqa: F401  registers torch.ops.speccompile
from speccompile.modes.network.draft_head import HeadCache, RowAttention


class BlockAttention(RowAttention, Protocol):
    """The attention of a head's layers. :class:`BlockCache` implements it for inference."""

    def attend_both_ways(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """:meth:`attend` for a query that attends to the context and to all of the block."""


@dataclass
class BlockCache(HeadCache):
    """The head's KV: of the context at the positions before a block, and of the block at its own positions.

    Args:
        last: int64 ``[B, T]``, the block's last position, repeated T times.
    """

    last: torch.Tensor

    def attend_both_ways(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        keys, values = self.write(layer, key, value)
        if window is None:
            # A query at the last position attends to every position of the block.
            return torch.ops.speccompile.attention(query, keys, values, self.slots, self.last, scale)
        return _attend_in_window(query, keys, values, self.slots, self.positions, scale, window)


def _attend_in_window(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    scale: float,
    window: int,
) -> torch.Tensor:
    """Attention to positions less than ``window`` away, up to the block's last one.

    The attention op has no such mask, so the keys and values of these positions are gathered.
    """
    reach = window - 1 + positions.shape[1]
    places = positions[:, :1] - (window - 1) + torch.arange(reach, device=positions.device)
    distance = (positions[:, :, None] - places[:, None]).abs()
    visible = (distance < window) & (places >= 0)[:, None]
    rows = (slots[:, None], places.clamp(min=0))
    attended = F.scaled_dot_product_attention(
        query.transpose(1, 2),
        keys[rows].transpose(1, 2),
        values[rows].transpose(1, 2),
        attn_mask=visible[:, None],
        scale=scale,
        enable_gqa=query.shape[2] != keys.shape[2],
    )
    return attended.transpose(1, 2)

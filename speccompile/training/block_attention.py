"""Attention of several blocks of one text. Each attends to the text before it and to itself."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class BlocksAttention:
    """Attention of one batch.

    A block whose first token is at position a attends to the positions before a, as to the cache of a decoding head.
    Blocks do not attend to one another: they belong to different steps.

    Source: "DFlash" (2026, arXiv 2602.06036), section 4; SpecForge, ``create_dflash_sdpa_mask``.

    Args:
        context: by layer, key and value ``[B, T, G, D]`` of the context.
        starts: int64 ``[B, N]``, the position of each block's first token.
    """

    def __init__(self, context: Sequence[tuple[torch.Tensor, torch.Tensor]], starts: torch.Tensor) -> None:
        self._context, self._blocks = context, starts.shape[1]
        length = context[0][0].shape[1]
        # [B, 1, 1, N, 1, T], where a head's scores are [B, G, H / G, N, block, T].
        self._hidden = (torch.arange(length, device=starts.device) >= starts[:, :, None])[:, None, None, :, None]

    def attend_both_ways(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend to the context and to the whole block. See
        :class:`~speccompile.modes.dflash.attention.BlockAttention`; rows ``[B, N * block, heads, D]`` are those of N
        blocks in order. Windows are not supported."""
        return self._attend(layer, query, key, value, scale, window, causal=False)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend to the context, and in the block only up to the query's position."""
        return self._attend(layer, query, key, value, scale, window, causal=True)

    def _attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None,
        *,
        causal: bool,
    ) -> torch.Tensor:
        assert window is None
        # [B, G, T, D]
        known_key, known_value = (x.transpose(1, 2) for x in self._context[layer])
        length, groups = known_key.shape[2], known_key.shape[1]
        # [B, heads, N, block, D]; heads of a group share keys.
        query, key, value = (x.transpose(1, 2).unflatten(2, (self._blocks, -1)) for x in (query, key, value))
        query = query.unflatten(1, (groups, -1)) * scale
        before = (query.flatten(3, 4) @ known_key[:, :, None].transpose(-1, -2)).unflatten(3, (self._blocks, -1))
        inside = query @ key[:, :, None].transpose(-1, -2)
        if causal:
            inside = inside.masked_fill(torch.ones_like(inside, dtype=torch.bool).triu(1), float("-inf"))
        scores = torch.cat([before.masked_fill(self._hidden, float("-inf")), inside], dim=-1)
        weights = scores.float().softmax(-1).to(query.dtype)
        out = (weights[..., :length].flatten(3, 4) @ known_value[:, :, None]).unflatten(3, (self._blocks, -1))
        out = out + weights[..., length:] @ value[:, :, None]
        return out.flatten(3, 4).flatten(1, 2).transpose(1, 2)

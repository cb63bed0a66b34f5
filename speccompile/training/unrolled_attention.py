"""Attention of unrolled draft steps: the contents of a head's KV cache, as tensors with gradients."""

from __future__ import annotations

import torch
from torch.nn import functional as F


class UnrolledAttention:
    """Attention of one batch; each call for a layer is the next draft step.

    Row t of step s is the draft s positions after row t of step 0. It attends to two groups of rows, as in a decoding
    head's cache: rows 0 .. t of step 0, which read the target's hidden states, and row t of steps 1 .. s, its own
    earlier drafts. Keys of other rows' drafts belong to other continuations.

    Source: Li et al., "EAGLE-3" (2025), section 3.2 and figure 6; SpecForge, ``LlamaAttention`` with ``cache_hidden``.
    """

    def __init__(self) -> None:
        self._kept: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        window: int | None = None,
    ) -> torch.Tensor:
        """Attend in the next step, see :class:`~speccompile.modes.network.draft_head.RowAttention`, without windows."""
        assert window is None
        steps = self._kept.setdefault(layer, [])
        # [B, heads, T, D]
        query, key, value = (x.transpose(1, 2) for x in (query, key, value))
        steps.append((key, value))
        if len(steps) == 1:
            out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=True)
        else:
            out = _attend(query, steps, scale)
        return out.transpose(1, 2)


def _attend(query: torch.Tensor, steps: list[tuple[torch.Tensor, torch.Tensor]], scale: float) -> torch.Tensor:
    """Attend with ``query`` ``[B, H, T, D]`` of the last step to keys and values ``[B, G, T, D]`` of all steps."""
    (first_key, first_value), own = steps[0], steps[1:]
    groups, length = first_key.shape[1], query.shape[2]
    # [B, G, H / G, T, D]: heads of a group share keys.
    query = query.unflatten(1, (groups, -1)) * scale
    scores = query @ first_key[:, :, None].transpose(-1, -2)
    later = torch.ones(length, length, dtype=torch.bool, device=query.device).triu(1)
    scores = scores.masked_fill(later, float("-inf"))
    diagonal = [(query * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
    weights = torch.cat([scores, *diagonal], dim=-1).float().softmax(-1).to(query.dtype)
    out = weights[..., :length] @ first_value[:, :, None]
    for place, (_, value) in enumerate(own):
        out = out + weights[..., length + place, None] * value[:, :, None]
    return out.flatten(1, 2)

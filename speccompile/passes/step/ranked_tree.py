"""Draft tokens of several levels as one tree, the likeliest first."""

from __future__ import annotations

from math import inf

import torch
from torch.nn.functional import pad

from speccompile.ops.draft_levels import ranked


def of_independent(
    tokens: torch.Tensor, logprobs: torch.Tensor, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The likeliest tree of drafts that do not depend on one another: every token of a level may follow every one of
    the level before.

    Args:
        tokens: int64 ``[B, levels, count]``, the likeliest of each level first, -1 for none; logprobs: float, of these.
        nodes: P.

    Returns:
        As :meth:`speccompile.modes.ready_mode.ReadyMode.propose_tree`.
    """
    rows, levels, count = tokens.shape
    chances, whole = torch.zeros_like(logprobs[:, 0, :1]), []
    # Of each node of the level before, its index among all tokens plus one; of the newest committed token 0.
    above = torch.zeros_like(tokens[:, 0, :1])
    first = 0
    for level in range(levels):
        all_chances = (chances[..., None] + logprobs[:, level, None]).flatten(1)
        parents = above[..., None].expand(-1, -1, count).flatten(1)
        offered = tokens[:, level, None].expand(-1, above.shape[1], -1).flatten(1)
        # Of a level no more than all nodes of the tree can be in it.
        index = all_chances.topk(min(nodes, offered.shape[1])).indices
        chances = all_chances.gather(1, index)
        whole.append((offered.gather(1, index), chances, parents.gather(1, index)))
        above = torch.arange(first + 1, first + 1 + index.shape[1], device=tokens.device).expand(rows, -1)
        first += index.shape[1]
    offered, chances, parents = (torch.cat(part, dim=1) for part in zip(*whole, strict=True))
    missing = (0, max(0, nodes - offered.shape[1]))
    offered, chances, parents = (
        pad(offered, missing, value=-1),
        pad(chances, missing, value=-inf),
        pad(parents, missing),
    )
    found, parents = ranked(offered, chances, parents, nodes)
    return found, parents, (found >= 0).long().cumprod(1).sum(1)

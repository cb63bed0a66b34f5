"""Siblings of a drafted tree that are drawn without replacement, for acceptance rules that read their distribution.

Adding Gumbel noise to log q and choosing the greatest in turn draws without replacement (Kool et al., "Stochastic Beams
and Where to Find Them", 2019). A rule is lossless only if the decision to keep a node does not depend on the node's own
token: what is kept follows from the tokens of its ancestors and of the siblings before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.errors import InvalidTiers
from speccompile.graph.tree import Tree
from speccompile.ops.noise import DRAFTS, gumbel
from speccompile.ops.numbers import numbers
from speccompile.passes.step.sample import probabilities

#: Shares below it are ranked as it.
LEAST = 1e-30


def check_siblings(tree: Tree) -> None:
    """Refuse a static tree that has a draw of a node without those before it.

    Raises:
        InvalidTiers: a path's last index is not 0, and no path has the next smaller one.
    """
    paths = set(tree.paths)
    for path in tree.paths:
        if path[-1] and (before := (*path[:-1], path[-1] - 1)) not in paths:
            reason = (
                f"the tree has the path {path}, and not {before}: siblings are judged in the order in which they were "
                "drawn, all of them; add that path, or use acceptance='exact'"
            )
            raise InvalidTiers(tiers=(tree,), reason=reason)


def draw_siblings(
    scores: torch.Tensor,
    begun: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    *,
    count: int,
    level: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw ``count`` tokens after each node of a level. Each node has separate noise, which no later step repeats.

    Args:
        scores: ``[B, m, V]``; begun: ``[B]``, committed tokens; slots: ``[B]``; temperature, seed: ``[N]``.

    Returns:
        Tokens ``[B, m, count]``, -1 where none is left; their log-probabilities, and the logarithms of the mass that
            was left before each draw, both -inf where there is no token; and q, ``[B, m, V]``.
    """
    rows, nodes, vocab = scores.shape
    noise = gumbel(seed[slots], DRAFTS, (begun + level)[:, None], nodes * vocab, begun).view(rows, nodes, vocab)
    own = temperature[slots]
    noisy = scores.float() + torch.where(own[:, None, None] > 0, noise, 0.0)
    tokens, _ = torch.ops.speccompile.likeliest(noisy, count)
    probs = probabilities(scores, own)
    return tokens, *shares_of(probs, tokens), probs


def shares_of(probs: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of ``tokens`` ``[B, m, count]`` by ``probs`` ``[B, m, V]``, and the logarithms of the mass that
    was left before each of them was drawn; see :func:`draw_siblings`."""
    offered = tokens >= 0
    shares = torch.where(offered, probs.gather(-1, tokens.clamp(min=0)).nan_to_num(0.0), 0.0)
    # No less than the share of the token: no child has a greater rank than its parent.
    left = torch.maximum(1 - shares.cumsum(-1) + shares, shares).clamp(LEAST, 1.0)
    return torch.where(offered, shares.clamp(min=LEAST).log(), -inf), torch.where(offered, left.log(), -inf)


def own_places(tokens: torch.Tensor) -> torch.Tensor:
    """The index of each of ``tokens`` ``[B, n]``, -1 where it is absent."""
    places = torch.arange(tokens.shape[1], device=tokens.device)
    return torch.where(tokens < 0, -1, places)


def at_places(values: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """``[B, n]`` of ``values`` ``[B, m]``."""
    return values.gather(1, places)


def drafts_at(
    places: torch.Tensor, tokens: torch.Tensor, *probs: torch.Tensor, expanded: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Drafts ``[B, nodes]``, -1 for none, and of each the distribution it was drawn from, ``[B, nodes, V]``.

    Args:
        places: ``[B, nodes]``, indices of proposed ``tokens`` ``[B, n]``, -1 for none.
        probs: of each level ``[B, m, V]``.
        expanded: of each proposed token, the index of its parent among the nodes of all levels.
    """
    index = places.clamp(min=0)
    drafts = torch.where(places < 0, -1, tokens.gather(1, index))
    rows = torch.arange(len(places), device=places.device)[:, None]
    return drafts, torch.cat(probs, 1)[rows, numbers(tuple(expanded), places.device)[index]]

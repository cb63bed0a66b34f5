"""Names of tiers, as a report shows them."""

from __future__ import annotations

from speccompile.graph.tree import Tree


def short_name(draft_len: int) -> str:
    """Of a tier: ``K=7``, or a tree by its nodes and depth."""
    if not isinstance(draft_len, Tree):
        return f"K={draft_len}"
    return f"{'tree' if draft_len.parents else 'dynamic tree'} of {int(draft_len)}, depth {draft_len.depth}"

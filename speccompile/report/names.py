"""Names of tiers in a report."""

from __future__ import annotations

from collections.abc import Iterable

from speccompile.graph.tree import Tree, in_order


def short_names(draft_lens: Iterable[int]) -> dict[int, str]:
    """Name of each tier: ``K=7``, or the nodes and depth of a tree. Trees of the same name are numbered from the second
    on.
    """
    names: dict[int, str] = {}
    for draft_len in in_order(draft_lens):
        name = _short_name(draft_len)
        alike = sum(_short_name(other) == name for other in names)
        names[draft_len] = name if not alike else f"{name} ({alike + 1})"
    return names


def _short_name(draft_len: int) -> str:
    if not isinstance(draft_len, Tree):
        return f"K={draft_len}"
    return f"{'tree' if draft_len.parents else 'dynamic tree'} of {int(draft_len)}, depth {draft_len.depth}"

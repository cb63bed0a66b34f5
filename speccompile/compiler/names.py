"""What stages and messages call the executables."""

from __future__ import annotations

from speccompile.graph.keys import ChunkKind, Kind
from speccompile.graph.tree import Tree


def tier_name(draft_len: int, rows: int, kind: Kind = "greedy") -> str:
    """What stages and messages call a tier: ``tier K=3, 1 row``."""
    shape = str(draft_len) if isinstance(draft_len, Tree) else f"K={draft_len}"
    return f"tier {shape}, {rows} row{'s' * (rows > 1)}{_of_kind(kind)}"


def mixed_name(draft_len: int, rows: int, kind: Kind = "greedy") -> str:
    """What stages and messages call a tier that also processes prompt tokens."""
    return f"mixed {tier_name(draft_len, rows, kind)}"


def prefill_name(width: int, kind: ChunkKind = "greedy") -> str:
    """What stages and messages call the executable of a prompt chunk."""
    return f"prefill T={width}{_of_kind(kind)}"


def _of_kind(kind: ChunkKind) -> str:
    return "" if kind == "greedy" else f", {kind}"

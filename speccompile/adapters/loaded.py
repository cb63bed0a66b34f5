"""An adapter that requests can have."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Adapter:
    """An adapter that was loaded. Two of one name are different ones: KV of one is never that of the other.

    Args:
        place: in the buffers.
        rank: the largest of its linears.
        linears: how many it adapts.
        replaced: it was removed, and another one has its place.
    """

    name: str
    place: int
    rank: int
    linears: int
    replaced: bool = False

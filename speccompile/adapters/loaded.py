"""A loaded adapter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(eq=False)
class Adapter:
    """A loaded adapter, compared by identity. Two adapters that were loaded under one name do not share KV.

    Args:
        position: its index in the buffers.
        rank: the largest rank among its linears.
        linears: the number of linears that it adapts.
        replaced: the adapter was removed, and another one has its position in the buffers.
    """

    name: str
    position: int
    rank: int
    linears: int
    replaced: bool = False

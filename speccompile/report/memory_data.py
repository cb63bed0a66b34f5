"""Memory in a report: buffers of the arena, memory that a wrap holds, and options that would save some of it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Buffer:
    """One state tensor of the arena; ``group`` is ``KV``, ``sequence``, ``drafter``, ``sampling``, ``adapters``,
    ``recurrent state`` or ``host``."""

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class MemoryItem:
    """Bytes under a path of names, such as ``("model", "layers", "mlp.up_proj")``; ``count`` tensors."""

    path: tuple[str, ...]
    nbytes: int
    count: int


@dataclass(frozen=True)
class Saving:
    """Saving by another option of ``wrap``, in bytes; negative if the option needs more."""

    option: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Memory:
    """All memory that a wrap holds. ``kv_bytes_per_token`` are those of one slot. ``pages`` is the number of pages of
    ``page_tokens`` that all slots share; 0 if each slot has its own piece of ``max_len`` tokens."""

    items: tuple[MemoryItem, ...]
    savings: tuple[Saving, ...]
    kv_bytes_per_token: int
    slots: int
    max_len: int
    pages: int = 0
    page_tokens: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)

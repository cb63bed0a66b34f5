"""The use of the KV of all slots."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graph.arena import Arena
from speccompile.runtime.slots import Slots


@dataclass(frozen=True)
class KVUse:
    """The use of the KV of a speculator. A page has the KV of ``page_tokens`` positions in all layers. Without a pool
    (``kv_memory=None``) each slot is one page.

    Args:
        page_bytes: bytes of a page, with those of the drafter's network.
        pages: number of pages; ``running`` belong to running requests, ``idle`` only to sequences that have ended, and
            are known until a request needs the page.
        shared: pages that several sequences hold.
    """

    page_tokens: int
    page_bytes: int
    pages: int
    running: int
    idle: int
    shared: int

    @property
    def free(self) -> int:
        """Number of pages that no sequence holds."""
        return self.pages - self.running - self.idle

    @property
    def nbytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes


def kv_use(arena: Arena, slots: Slots) -> KVUse:
    """The use of the KV in ``arena`` now."""
    layout, pool = arena.layout, slots.pool
    kept = [tensor for tensor in layout.tensors.values() if tensor.in_pages]
    of_token = sum(tensor.nbytes // (tensor.shape[0] * tensor.shape[1]) for tensor in kept)
    if pool is None:
        known = sum(bool(tokens) for tokens in slots.known)
        size = layout.cache_len
        return KVUse(size, size * of_token, layout.max_batch, len(slots.owned), known, 0)
    running = pool.held_by(request.slot for request in slots.owned)
    held = pool.held_by(range(layout.max_batch))
    size = pool.page_size
    return KVUse(size, size * of_token, pool.size, len(running), len(held - running), pool.shared)

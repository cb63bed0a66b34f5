"""KV in pages of a pool: the sizes of the pool, and the layout with it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from speccompile.graph.state import Layout, StateTensor
from speccompile.utils.kv_memory import PAGE

#: The state tensor ``[N, M]`` with the page of each C positions of each slot.
PAGES = "pages"
#: The page of positions that no request owns. Steps write padding there, and no query attends to it.
UNUSED = 0


class GathersKV(Exception):
    """A step would copy KV of a row from all of its pages, and may not."""


@dataclass(frozen=True)
class Paging:
    """The pool of pages that the KV of all slots is in.

    Args:
        count: P, the number of pages, with :data:`UNUSED`.
        per_slot: M, the pages of the longest sequence.
        ahead: the number of positions after the tokens of a sequence that executables write and read.
        size: C, the positions of a page.
    """

    count: int
    per_slot: int
    ahead: int
    size: int = PAGE

    def pages_of(self, positions: int) -> int:
        """The number of pages with so many positions."""
        return -(-positions // self.size)


def paged(layout: Layout, paging: Paging) -> Layout:
    """``layout`` with its KV in pools ``[P, C, ...]``, and the state :data:`PAGES`."""
    tensors = {
        name: replace(tensor, shape=(paging.count, paging.size, *tensor.shape[2:])) if tensor.in_pages else tensor
        for name, tensor in layout.tensors.items()
    }
    slots = layout.max_batch + 1
    tensors[PAGES] = StateTensor(
        PAGES, (slots, paging.per_slot), torch.int64, UNUSED, 0, paging.count, False, False, False, ()
    )
    return replace(layout, tensors=tensors, paging=paging, unpaged=layout)


def page_and_place(
    pages: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor, *, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages and places in them, ``[B, T]``, of ``positions`` ``[B, T]`` of the slots ``rows`` ``[B, 1]``, by the table
    ``pages`` ``[N, M]``."""
    return pages[rows, positions // size], positions % size

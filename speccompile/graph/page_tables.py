"""The pages of each slot, as the host knows them, and their state tensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from speccompile.graph.paging import PAGES, UNUSED
from speccompile.graph.state import Layout
from speccompile.utils.devices import traits_of


def stage(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy ``values`` to ``place``, in the order of runs. The host does not wait for a running step: values are copied
    to pinned memory, which torch keeps until the copy to the device is done."""
    if traits_of(place.device).asynchronous and traits_of(values.device).host_memory:
        values = values.pin_memory()
    place.copy_(values, non_blocking=True)


class PageTables:
    """The page table of an arena. At first, all slots have a page as long as there are some, and the first slot and the
    dummy slot have the others: with them a new wrap compares its graphs with the model.

    Args:
        tensors: the tensors of the arena, by name.
    """

    def __init__(self, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        assert layout.paging is not None
        self._paging, self._table = layout.paging, tensors[PAGES]
        self._pages: list[list[int]] = [[] for _ in range(len(self._table))]
        self._layout = layout
        self.begin()

    def begin(self) -> None:
        """Assign the pages as at first."""
        layout = self._layout
        compared = (0, layout.dummy_slot)
        slots = [*compared, *range(layout.max_batch - 1, 0, -1), *compared * (self._paging.per_slot - 1)]
        numbers = (page for page in range(self._paging.count) if page != UNUSED)
        assigned: list[list[int]] = [[] for _ in self._pages]
        for slot, page in zip(slots, numbers, strict=False):
            assigned[slot].append(page)
        for slot, pages in enumerate(assigned):
            self.set(slot, pages)

    def set(self, slot: int, pages: Sequence[int]) -> None:
        """Let ``pages`` hold the positions of ``slot``, in order."""
        self._pages[slot] = list(pages)
        unused = [UNUSED] * (self._paging.per_slot - len(pages))
        stage(self._table[slot], torch.tensor([*pages, *unused], dtype=self._table.dtype))

    def positions(self, slot: int) -> int:
        """The number of positions of ``slot`` that have a page."""
        return self._paging.size * len(self._pages[slot])

    def places(self, slot: int, start: int, stop: int | None) -> list[tuple[int, slice]]:
        """The page and the places in it of the positions from ``start`` to ``stop`` of ``slot``, page by page. None is
        the end of its pages."""
        size, pages = self._paging.size, self._pages[slot]
        stop = size * len(pages) if stop is None else stop
        return [
            (page, slice(max(0, start - first), min(size, stop - first)))
            for page, first in zip(pages, range(0, size * len(pages), size), strict=True)
            if first < stop and start < first + size
        ]

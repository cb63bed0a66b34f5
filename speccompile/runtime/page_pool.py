"""The pages of KV that slots hold, and how many of them share each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from speccompile.graph.arena import Arena
from speccompile.graph.paging import UNUSED, Paging


class PagePool:
    """Assigns pages to slots. A page of a known prefix belongs to several slots at once: none of them writes to it,
    since each writes after the prefix.

    Args:
        arena: an arena with a paged layout.
    """

    def __init__(self, arena: Arena, paging: Paging) -> None:
        self._arena, self._paging = arena, paging
        self._free = [page for page in range(paging.count) if page != UNUSED][::-1]
        self._holders: Counter[int] = Counter()
        self._pages: dict[int, list[int]] = {}
        for slot in range(arena.layout.max_batch + 1):
            self._hold(slot, [])

    @property
    def size(self) -> int:
        """The number of pages."""
        return self._paging.count - 1

    @property
    def ahead(self) -> int:
        """The number of positions after its tokens for which a running sequence needs pages."""
        return self._paging.ahead

    @property
    def page_size(self) -> int:
        """The positions of a page."""
        return self._paging.size

    @property
    def free(self) -> int:
        """The number of pages that no slot holds."""
        return len(self._free)

    @property
    def shared(self) -> int:
        """The number of pages that several slots hold."""
        return sum(count > 1 for count in self._holders.values())

    def pages_of(self, positions: int) -> int:
        """The number of pages with so many positions."""
        return self._paging.pages_of(positions)

    def whole(self, positions: int) -> int:
        """The number of positions in whole pages among the first ``positions``."""
        return positions - positions % self._paging.size

    def count(self, slot: int) -> int:
        """The number of pages that ``slot`` holds."""
        return len(self._pages[slot])

    def held_by(self, slots: Iterable[int]) -> set[int]:
        """The pages that these slots hold."""
        return {page for slot in slots for page in self._pages[slot]}

    def is_shared(self, page: int) -> bool:
        """Whether several slots hold ``page``."""
        return self._holders[page] > 1

    def first_pages(self, slot: int, positions: int) -> list[int]:
        """The pages of the first ``positions`` of ``slot``."""
        return self._pages[slot][: self.pages_of(positions)]

    def assign(self, slot: int, first: Sequence[int], count: int) -> None:
        """Let ``slot`` hold the pages ``first``, which it or another slot holds, and free ones after them, ``count`` in
        all. The slot's other pages must have been released."""
        missing = count - len(first)
        if missing > len(self._free):
            raise RuntimeError(f"slot {slot} needs {missing} pages, and {len(self._free)} are free")
        new = [self._free.pop() for _ in range(missing)]
        kept = set(self._pages[slot])
        self._holders.update([page for page in [*first, *new] if page not in kept])
        self._hold(slot, [*first, *new])

    def extend(self, slot: int, count: int) -> None:
        """Let ``slot`` hold ``count`` more pages, which must be free."""
        held = self._pages[slot]
        self.assign(slot, held, len(held) + count)

    def release(self, slot: int, keep: int = 0) -> None:
        """Release the pages of ``slot`` after the first ``keep``."""
        kept, released = self._pages[slot][:keep], self._pages[slot][keep:]
        for page in released:
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                self._free.append(page)
        if released:
            self._hold(slot, kept)

    def _hold(self, slot: int, pages: list[int]) -> None:
        self._pages[slot] = pages
        self._arena.set_pages(slot, pages)

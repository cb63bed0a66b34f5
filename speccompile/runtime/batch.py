"""The requests that decode, and those whose prompts are being processed."""

from __future__ import annotations

from speccompile.graph.arena import Arena
from speccompile.graph.keys import KINDS, Kind
from speccompile.runtime.request import Request
from speccompile.runtime.unread_tokens import UnreadTokens


class Batch:
    """The requests that own a slot.

    Args:
        unread: counts what the drafter has read of each row; None if every step updates the drafter.

    Attributes:
        rows: requests whose prompt has been processed, in the order of the next step's rows.
        readers: requests whose prompt has been processed in part, in the order in which they got their slots.
        without_drafts: rows whose logits became NaN by their drafts. Their next step has no drafts.
    """

    def __init__(self, arena: Arena, unread: UnreadTokens | None = None) -> None:
        self._arena = arena
        self._unread = unread
        self.rows: list[Request] = []
        self.readers: list[Request] = []
        self.without_drafts: set[Request] = set()

    @property
    def kind(self) -> Kind:
        """The lowest kind of executables that serves all rows."""
        return max((request.params.kind for request in self.rows), key=KINDS.index, default="greedy")

    def join(self, request: Request) -> None:
        """Turn ``request`` into a row, since its prompt has been processed."""
        self.readers.remove(request)
        self.rows.append(request)
        if self._unread is not None:
            self._unread.begin(request)
        self.bind()

    def remove(self, request: Request) -> None:
        """Remove ``request`` from rows and readers. The caller calls :meth:`bind` afterwards."""
        for requests in (self.readers, self.rows):
            if request in requests:
                requests.remove(request)
        self.without_drafts.discard(request)

    def bind(self) -> None:
        """Write the rows' slots into the arena. Unused rows get the dummy slot."""
        layout, slots = self._arena.layout, [request.slot for request in self.rows]
        slots += [layout.dummy_slot] * (layout.max_batch - len(slots))
        self._arena.write("slots", slice(None), slots)

    def goes_first(self, request: Request) -> bool:
        """Whether the complete prompt of ``request`` may be processed before the next step: no caller watches the
        tokens of another request."""
        return not self.rows or (request.params.patient and all(row.params.patient for row in self.rows))

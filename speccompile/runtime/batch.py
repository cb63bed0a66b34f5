"""The requests that decode, and the one whose prompt is being read."""

from __future__ import annotations

from speccompile.graph.arena import Arena
from speccompile.graph.keys import KINDS, Kind
from speccompile.runtime.request import Request


class Batch:
    """Requests with a slot.

    Attributes:
        rows: those whose prompt has been read, in the order of the next step's rows.
        reader: the one whose prompt is being read.
        without_drafts: rows whose drafts made their logits NaN; their next step has no drafts.
    """

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.rows: list[Request] = []
        self.reader: Request | None = None
        self.without_drafts: set[Request] = set()

    @property
    def kind(self) -> Kind:
        """The least kind of executables that serves all rows."""
        return max((request.params.kind for request in self.rows), key=KINDS.index, default="greedy")

    def join(self, request: Request) -> None:
        """The prompt of ``request`` has been read: it is a row from now on."""
        self.reader = None
        self.rows.append(request)
        self.bind()

    def remove(self, request: Request) -> None:
        """Remove ``request``, whether it is a row or the reader. The caller calls :meth:`bind` afterwards."""
        if request is self.reader:
            self.reader = None
        if request in self.rows:
            self.rows.remove(request)
        self.without_drafts.discard(request)

    def bind(self) -> None:
        """Write the rows' slots into the arena; unused rows get the dummy slot."""
        layout, slots = self._arena.layout, [request.slot for request in self.rows]
        slots += [layout.dummy_slot] * (layout.max_batch - len(slots))
        self._arena.write("slots", slice(None), slots)

    def goes_first(self, request: Request) -> bool:
        """Whether all of the prompt of ``request`` may run before the next step: no other request's tokens are
        watched."""
        return not self.rows or (request.params.patient and all(row.params.patient for row in self.rows))

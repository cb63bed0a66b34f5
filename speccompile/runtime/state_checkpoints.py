"""Checkpoints of recurrent state: places in the middle of a sequence from which another prompt can go on."""

from __future__ import annotations

from speccompile.graph.arena import Arena


class StateCheckpoints:
    """Which checkpoints each slot holds.

    The checkpoint ``index`` of a slot is its state at the first end of a step or prompt chunk in the tokens
    ``[(index + 1) * interval, (index + 2) * interval)`` of its sequence. Such a state belongs to the tokens before its
    place, as KV does.

    Args:
        interval: tokens between two checkpoints; None keeps none.
    """

    def __init__(self, arena: Arena, interval: int | None) -> None:
        self._arena = arena
        # Tiers of one shape reuse no prefixes, and have no room for checkpoints.
        self._interval = interval if arena.layout.checkpoints else None
        # The place of each checkpoint, by slot and index.
        self._places: dict[int, dict[int, int]] = {slot: {} for slot in range(arena.layout.max_batch)}

    def save(self, slot: int) -> None:
        """Called after each step and prompt chunk of ``slot``: copy its state, if it is the first in its interval."""
        if self._interval is None:
            return
        place = self._arena.recurrent_place(slot)
        assert place is not None
        index = place // self._interval - 1
        if index >= 0 and index not in self._places[slot]:
            self._arena.save_checkpoint(slot, index)
            self._places[slot][index] = place

    def latest(self, slot: int, length: int) -> int:
        """The place of the last checkpoint of ``slot`` within its first ``length`` tokens; 0 if there is none."""
        return max((place for place in self._places[slot].values() if place <= length), default=0)

    def take_over(self, source: int, slot: int, length: int) -> None:
        """The first ``length`` tokens of ``slot`` are those of ``source`` from now on. It holds their checkpoints, and
        no others."""
        kept = {index: place for index, place in self._places[source].items() if place <= length}
        if source != slot:
            for index in kept:
                self._arena.copy_checkpoint(source, slot, index)
        self._places[slot] = kept

    def drop(self, slot: int) -> None:
        """``slot`` holds none from now on."""
        self._places[slot] = {}

    def start_at(self, slot: int, place: int) -> None:
        """Let the state of ``slot`` go on from its checkpoint at ``place``."""
        assert self._interval is not None
        self._arena.start_at_checkpoint(slot, place // self._interval - 1, place)

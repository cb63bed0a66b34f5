"""Checkpoints of recurrent state: positions within a sequence from which another prompt can continue."""

from __future__ import annotations

from speccompile.graph.arena import Arena


class StateCheckpoints:
    """The checkpoints of each slot.

    The checkpoint ``index`` of a slot is its state at the first end of a step or prompt chunk within the tokens
    ``[(index + 1) * interval, (index + 2) * interval)`` of its sequence. Such a state depends only on the tokens before
    its position, as KV does.

    Args:
        interval: tokens between two checkpoints; None keeps none.
    """

    def __init__(self, arena: Arena, interval: int | None) -> None:
        self._arena = arena
        # Tiers of one shape reuse no prefixes, and have no state for checkpoints.
        self._interval = interval if arena.layout.checkpoints else None
        # The position of each checkpoint, by slot and index.
        self._positions: dict[int, dict[int, int]] = {slot: {} for slot in range(arena.layout.max_batch)}

    def save(self, slot: int) -> None:
        """Copy the state of ``slot``, if it is the first in its interval. Called after each step and prompt chunk."""
        if self._interval is None:
            return
        position = self._arena.absorbed_tokens(slot)
        assert position is not None
        index = position // self._interval - 1
        if index >= 0 and index not in self._positions[slot]:
            self._arena.save_checkpoint(slot, index)
            self._positions[slot][index] = position

    def latest(self, slot: int, length: int) -> int:
        """Return the position of the last checkpoint of ``slot`` within its first ``length`` tokens; 0 without one."""
        return max((position for position in self._positions[slot].values() if position <= length), default=0)

    def take_over(self, source: int, slot: int, length: int) -> None:
        """Copy the checkpoints of the first ``length`` tokens of ``source`` to ``slot``, which has these tokens from
        now on. It keeps no others."""
        kept = {index: position for index, position in self._positions[source].items() if position <= length}
        if source != slot:
            for index in kept:
                self._arena.copy_checkpoint(source, slot, index)
        self._positions[slot] = kept

    def drop(self, slot: int) -> None:
        """Drop all checkpoints of ``slot``."""
        self._positions[slot] = {}

    def start_at(self, slot: int, position: int) -> None:
        """Let the state of ``slot`` continue from its checkpoint at ``position``."""
        assert self._interval is not None
        self._arena.start_at_checkpoint(slot, position // self._interval - 1, position)

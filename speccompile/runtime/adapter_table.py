"""The loaded adapters by name, and their positions in the arena."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

from speccompile.adapters.buffers import AdapterBuffers, LoraPair, LoraPairs, write_adapter
from speccompile.adapters.loaded import Adapter
from speccompile.errors import AdaptersFull, InvalidAdapter, InvalidOption, UnknownAdapter
from speccompile.graph.arena import Arena
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots
from speccompile.runtime.waiting import WaitingQueue


class AdapterTable:
    """Loads adapters into positions of the arena's buffers, and finds them by name.

    A position is free again when its adapter was removed and the last request with it has ended. Adapters are added and
    removed between two steps.

    Args:
        buffers: None if the model was wrapped without adapters.
    """

    def __init__(
        self, buffers: AdapterBuffers | None, arena: Arena, slots: Slots, waiting: WaitingQueue, loop: EngineLoop
    ) -> None:
        self.buffers = buffers
        self._loop = loop
        self._arena = arena
        self._slots = slots
        self._waiting = waiting
        self._loaded: dict[str, Adapter] = {}
        # The newest adapter of each position.
        self._at: dict[int, Adapter] = {}

    @property
    def loaded(self) -> tuple[Adapter, ...]:
        """Adapters that requests can name, in the order in which they were added."""
        return tuple(self._loaded.values())

    def find(self, where: str, name: Any) -> Adapter | None:
        """Return the adapter of a request, by its option. None means the model without an adapter.

        Raises:
            InvalidOption: ``name`` is not a string, or the model was wrapped without adapters.
            UnknownAdapter: no adapter of that name is loaded.
        """
        if name is None:
            return None
        self._check_enabled(where, name)
        if not isinstance(name, str):
            raise InvalidOption(where=where, name="adapter", value=name, reason="give the name of an adapter, or None")
        return self._named(name)

    def pairs(self, adapter: Adapter) -> dict[str, LoraPair]:
        """Return the LoRA pair of each linear, as views of the buffers."""
        assert self.buffers is not None
        return self.buffers.pairs_at(self._arena, adapter.position)

    def check_name(self, name: str) -> AdapterBuffers:
        """Check that an adapter with that name can be added.

        Raises:
            InvalidOption: ``name`` is not a string, or the model was wrapped without adapters.
            InvalidAdapter: an adapter of that name is loaded.
        """
        self._check_enabled("add_adapter", name)
        assert self.buffers is not None
        if not isinstance(name, str) or not name:
            raise InvalidOption(where="add_adapter", name="name", value=name, reason="give a non-empty string")
        if name in self._loaded:
            reason = "an adapter of that name is loaded; call spec.remove_adapter(name), or choose another name"
            raise InvalidAdapter(name=name, source="loaded", reason=reason)
        return self.buffers

    def add(self, name: str, pairs: LoraPairs, head: Mapping[str, torch.Tensor] | None = None) -> None:
        """Load an adapter into a free position. Slow work is done before the engine's lock is acquired.

        Args:
            head: the values of its draft head for the state tensors, by name; None without buffers for heads.

        Raises:
            InvalidOption: the model was wrapped without adapters.
            InvalidAdapter: an adapter of that name is loaded.
            AdaptersFull: no position is free.
            InsideStep: the caller is a callback of a step.
        """
        self._loop.refuse_callback("add_adapter()")
        packed = self.check_name(name).packed(pairs) | dict(head or {})
        with self._loop.exclusive():
            # Another thread may have added an adapter meanwhile.
            position = self._free_position(name, self.check_name(name).count)
            write_adapter(self._arena, position, packed)
            if position in self._at:
                self._at[position].replaced = True
            adapter = Adapter(name, position, max(pair.a.shape[0] for pair in pairs.values()), len(pairs))
            self._loaded[name] = self._at[position] = adapter

    def remove(self, name: str) -> None:
        """Remove an adapter, so no further request can have it. Requests that wait or run keep it.

        Raises:
            InvalidOption: the model was wrapped without adapters.
            UnknownAdapter: no adapter of that name is loaded.
            InsideStep: the caller is a callback of a step.
        """
        self._loop.refuse_callback("remove_adapter()")
        with self._loop.exclusive():
            self._check_enabled("remove_adapter", name)
            del self._loaded[self._named(name).name]

    def _free_position(self, name: str, count: int) -> int:
        taken = self._taken()
        position = next((position for position in range(count) if position not in taken), None)
        if position is None:
            raise AdaptersFull(name=name, count=count, loaded=len(self._loaded), more=count + 1)
        return position

    def _taken(self) -> Collection[int]:
        requests: list[Request] = [*self._slots.owned, *self._waiting.requests]
        held = {request.params.adapter.position for request in requests if request.params.adapter is not None}
        return held | {adapter.position for adapter in self._loaded.values()}

    def _check_enabled(self, where: str, name: Any) -> None:
        if self.buffers is None:
            reason = "the model was wrapped without adapters; wrap it with adapters=speccompile.Adapters(count=...)"
            raise InvalidOption(where=where, name="adapter", value=name, reason=reason)

    def _named(self, name: str) -> Adapter:
        if name not in self._loaded:
            raise self._unknown(name)
        return self._loaded[name]

    def _unknown(self, name: str) -> UnknownAdapter:
        return UnknownAdapter(name=name, loaded=", ".join(self._loaded) or "none")

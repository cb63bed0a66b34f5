"""Writes what the next chunk of a prompt reads in the places of its placeholder tokens."""

from __future__ import annotations

from speccompile.graph.arena import Arena
from speccompile.multimodal.features import PromptFeatures
from speccompile.multimodal.model_inputs import EMBEDDED, EMBEDDINGS, LAYER_EMBEDDINGS, ROPE_OFFSETS

_EVERY = slice(None)


class ChunkFeatures:
    """The inputs of chunks beside tokens, in an arena that has them."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        # Whether the newest chunk had features. The next one without any clears them.
        self._written = False

    def write(self, features: PromptFeatures | None, start: int, width: int) -> None:
        """Write those of a chunk of ``width`` tokens from ``start`` on; None is a prompt without images."""
        arena = self._arena
        if features is None:
            if self._written:
                self._clear()
            return
        self._written = True
        chunk = features.chunk(start, width)
        arena.write(EMBEDDED, _EVERY, chunk.embedded)
        arena.write(EMBEDDINGS, _EVERY, chunk.embeddings)
        for layer, values in enumerate(chunk.layers):
            arena.write(LAYER_EMBEDDINGS, layer, values)
        if chunk.offsets is not None:
            for part, offsets in enumerate(chunk.offsets):
                arena.write(ROPE_OFFSETS, part, offsets)

    def _clear(self) -> None:
        self._written = False
        for name in (EMBEDDED, LAYER_EMBEDDINGS, ROPE_OFFSETS):
            if name in self._arena:
                self._arena.write(name, _EVERY, 0)

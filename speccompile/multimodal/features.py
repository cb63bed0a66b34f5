"""Embeddings that prompts have in the places of placeholder tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import ClassVar

import torch

from speccompile.graph.arena import Arena
from speccompile.graph_capture.rope_positions import PARTS
from speccompile.multimodal.image_keys import ImagePlace
from speccompile.multimodal.model_inputs import ROPE_DELTA


@dataclass(frozen=True)
class PromptFeatures:
    """The embeddings of the images of one prompt, as the model's own code computes them.

    Args:
        places: the E places of the prompt with an embedding, ascending, int64 on the CPU.
        embeddings: ``[E, M]``, what the first decoder layer reads there.
        layers: ``[D, E, M]``, what is added there after the first D decoder layers.
        offsets: int64 ``[PARTS, P]``, rotary positions of the P tokens less their places; None without parts.
        delta: rotary positions of later tokens less their places.
        images: the image in each of the E places; None where it is not known.
    """

    places: torch.Tensor
    embeddings: torch.Tensor
    layers: torch.Tensor
    offsets: torch.Tensor | None = None
    delta: int = 0
    images: Sequence[ImagePlace] | None = None

    #: Whether chunks of the prompt read them.
    in_chunks: ClassVar[bool] = True

    def place(self, arena: Arena, slot: int) -> None:
        """Write what later steps of ``slot`` read."""
        if ROPE_DELTA in arena:
            arena.write(ROPE_DELTA, slot, self.delta)

    def identities(self, prompt: Sequence[int]) -> list[int]:
        """A number for each token of ``prompt``: its id; where it has an embedding, a negative hash of its rotary
        positions and of the image, or of the embedding where the image is not known. Prompts with equal numbers have
        equal KV, but for last bits of an image that was embedded beside others."""
        offsets = torch.zeros((PARTS, len(prompt)), dtype=torch.int64) if self.offsets is None else self.offsets
        found = list(prompt)
        for place, content in zip(self.places.tolist(), self._contents(), strict=True):
            digest = blake2b(content, digest_size=8)
            digest.update(offsets[:, place].contiguous().numpy().tobytes())
            found[place] = -1 - int.from_bytes(digest.digest(), "big")
        return found

    def _contents(self) -> Iterator[bytes]:
        if self.images is not None:
            return (key + place.to_bytes(8, "big") for key, place in self.images)
        rows = [self.embeddings[:, None], self.layers.movedim(0, 1)]
        values = torch.cat(rows, dim=1).flatten(1).contiguous().cpu().view(torch.uint8)
        return (row.numpy().tobytes() for row in values)

    @property
    def decodes_last(self) -> bool:
        """Whether a decode step can process the last token of the prompt: it has no embedding, and the rotary position
        of a later token."""
        if self.offsets is None:
            return True
        return bool((self.offsets[:, -1] == self.delta).all())

    def chunk(self, start: int, width: int) -> Chunk:
        """The part for the tokens from ``start`` on, with ``width`` places."""
        first, last = torch.searchsorted(self.places, torch.tensor([start, start + width])).tolist()
        places = (self.places[first:last] - start).to(self.embeddings.device)
        embedded = torch.zeros(width, dtype=torch.bool, device=places.device)
        embedded[places] = True
        embeddings = self.embeddings.new_zeros((width, self.embeddings.shape[1]))
        embeddings[places] = self.embeddings[first:last]
        layers = self.layers.new_zeros((len(self.layers), width, self.embeddings.shape[1]))
        layers[:, places] = self.layers[:, first:last]
        offsets = None
        if self.offsets is not None:
            offsets = torch.zeros((PARTS, width), dtype=torch.int64)
            known = self.offsets[:, start : start + width]
            offsets[:, : known.shape[1]] = known - self.delta
        return Chunk(embedded, embeddings, layers, offsets)


@dataclass(frozen=True)
class Chunk:
    """The part of :class:`PromptFeatures` for T tokens: ``embedded`` ``[T]``, ``embeddings`` ``[T, M]``, ``layers``
    ``[D, T, M]``; ``offsets`` ``[PARTS, T]`` of rotary positions, less those that decode steps would compute."""

    embedded: torch.Tensor
    embeddings: torch.Tensor
    layers: torch.Tensor
    offsets: torch.Tensor | None

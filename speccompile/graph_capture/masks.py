"""Masks that transformers requests, recognised by their effect: the keys that each query attends to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from speccompile.errors import CaptureError

# transformers' signature: indices (batch, head, query, key) to a bool tensor, elementwise.
MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class UnsupportedByRoute(Exception):
    """A part of the model that this route of capture cannot express. The message names it."""


@dataclass(frozen=True)
class Mask:
    """The query at position p attends to keys j <= p with j > p - ``window`` and j // ``chunk`` == p // ``chunk``."""

    window: int | None = None
    chunk: int | None = None

    def to(self, dtype: torch.dtype) -> Mask:
        """Return the mask itself. MPT's forward converts the mask that it requests."""
        return self

    def __getitem__(self, kept: tuple[slice, ...]) -> Mask:
        """Return the mask itself if all queries and keys are kept. Gemma 4's forward keeps the queries of
        ``logits_to_keep`` in layers that share KV; its default is all.

        Raises:
            IndexError: some are not kept.
        """
        if any((part.start or 0, part.stop, part.step) != (0, None, None) for part in kept):
            raise IndexError(f"a mask over a part of the queries or keys: {kept}")
        return self

    @property
    def reach(self) -> int:
        """The length from which the mask hides a key that a causal mask shows; 0 for never."""
        return max(self.window or 0, self.chunk or 0)

    def sees(self, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        """Whether each query attends to each key, elementwise, for int64 positions that broadcast."""
        seen = key <= query
        if self.window is not None:
            seen = seen & (key > query - self.window)
        if self.chunk is not None:
            seen = seen & (key // self.chunk == query // self.chunk)
        return seen


@dataclass(frozen=True)
class ForeignMask:
    """A mask of another kind. Requesting it (for an absent encoder) is allowed, attending with it is not."""

    name: str


def recognise(function: MaskFunction, local_size: int | None, device: torch.device) -> Mask | None:
    """Return the mask that ``function`` computes, or None if it is not a :class:`Mask`.

    The function's code is not inspected. The function is called for all pairs of positions around the borders that
    ``local_size`` (the size of a window or chunk) creates, and for distances up to 2**17.
    """
    borders = {2**power for power in range(18)} | {times * (local_size or 0) for times in range(1, 4)}
    positions = sorted({max(0, border + offset) for border in borders for offset in range(-2, 3)})
    query = torch.tensor(positions, device=device)[:, None]
    key = torch.tensor(positions, device=device)[None, :]
    origin = torch.zeros((1, 1), dtype=torch.int64, device=device)
    try:
        seen = function(origin, origin, query, key).expand(len(positions), len(positions))
    except (IndexError, RuntimeError):
        return None  # it looks up positions in a table of this very sequence
    candidates = [Mask()]
    if local_size is not None:
        candidates += [Mask(window=local_size), Mask(chunk=local_size)]
    return next((mask for mask in candidates if torch.equal(mask.sees(query, key), seen)), None)


class MaskLog:
    """The masks of one forward, in the order of the requests: recorded on real tensors, repeated under export."""

    def __init__(self, known: Sequence[Mask | ForeignMask] | None = None) -> None:
        self.seen: list[Mask | ForeignMask] = []
        self._known = known

    def ask(self, function: MaskFunction, local_size: int | None, device: torch.device) -> Mask | ForeignMask:
        """Return the mask that ``function`` computes.

        Raises:
            CaptureError: export requests more masks than were recorded.
        """
        if self._known is not None:
            if len(self.seen) == len(self._known):
                reason = "under export the model requests more attention masks than in a forward"
                raise CaptureError(reason, masks=len(self._known))
            self.seen.append(self._known[len(self.seen)])
        else:
            self.seen.append(recognise(function, local_size, device) or ForeignMask(_name(function)))
        return self.seen[-1]


def _name(function: Any) -> str:
    return getattr(function, "__qualname__", repr(function)).removesuffix("_function")

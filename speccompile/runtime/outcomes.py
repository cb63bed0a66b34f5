"""What a run tells the host: copied out in the order of runs, and read when the host comes to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from speccompile.graph.arena import Arena
from speccompile.utils.devices import traits_of


def pack(arena: Arena) -> torch.Tensor:
    """int64 ``[4 + T, N]``: emitted, accepted and proposed tokens of each slot, whether it is alive, and its newest
    tokens, of which as many are of the newest run as were emitted."""
    emitted, length, tokens = arena["emitted"], arena["length"], arena["tokens"]
    # In bounds for any slot: there are T places behind max_len.
    places = (length - emitted)[:, None] + torch.arange(arena.layout.max_width, device=arena.device)
    columns = torch.stack([emitted, arena["accepted"], arena["proposed"], arena["alive"].long()])
    return torch.cat([columns, tokens.gather(1, places).T])


class Buffer(Protocol):
    """Takes one packed outcome at a time to the host."""

    def fill(self, packed: torch.Tensor) -> None:
        """Begin; ``packed`` may be overwritten by what runs next."""

    def read(self) -> list[list[int]]:
        """Wait for it."""


class HostBuffer:
    """Where the arena is the host's own memory, and a run has ended when it returns."""

    def fill(self, packed: torch.Tensor) -> None:
        self._told: list[list[int]] = packed.tolist()

    def read(self) -> list[list[int]]:
        return self._told


class PinnedBuffer:
    """From a GPU, beside what runs there next."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._host = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self._arrived = torch.cuda.Event()

    def fill(self, packed: torch.Tensor) -> None:
        self._host.copy_(packed, non_blocking=True)
        self._arrived.record()

    def read(self) -> list[list[int]]:
        self._arrived.synchronize()
        told: list[list[int]] = self._host.tolist()
        return told


class Outcome:
    """Of one run. Read once, at any time."""

    def __init__(self, buffer: Buffer, free: list[Buffer]) -> None:
        self._buffer = buffer
        self._free = free

    def read(self) -> list[list[int]]:
        """The columns of :func:`pack`; their buffer is another run's from here on."""
        told = self._buffer.read()
        self._free.append(self._buffer)
        return told


class Outcomes:
    """Copies of what runs told, one for each run that was not read yet.

    There are as many buffers as outcomes were ever unread at a time; one that nobody reads any more is not used again,
    since the device may still write to it.

    Args:
        pack: what to copy.
        make: a new buffer.
    """

    def __init__(self, pack: Callable[[], torch.Tensor], make: Callable[[], Buffer]) -> None:
        self._pack = pack
        self._make = make
        self._free: list[Buffer] = []

    def take(self) -> Outcome:
        """What the newest run told; returns before it has ended."""
        buffer = self._free.pop() if self._free else self._make()
        buffer.fill(self._pack())
        return Outcome(buffer, self._free)

    @staticmethod
    def of(arena: Arena, pack: Callable[[], torch.Tensor]) -> Outcomes:
        shape = (4 + arena.layout.max_width, arena.layout.max_batch + 1)
        return Outcomes(pack, (lambda: PinnedBuffer(shape)) if traits_of(arena.device).asynchronous else HostBuffer)

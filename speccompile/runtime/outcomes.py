"""Results of runs for the host: copied to it in the order of the runs, and read later."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from speccompile.graph.arena import Arena
from speccompile.graph.tree import PROPOSAL
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.runtime.proposal import NO_PROPOSAL, Proposal
from speccompile.utils.devices import traits_of

#: Where tiers are trees: what became of the chain in the tree, and how deep the tree was.
OF_TREE = ("chain_accepted", "chain_judged", "deepest_draft")
#: Where drafters propose at the end of a step: the fields of :class:`~speccompile.runtime.proposal.Proposal`, in order.
OF_PROPOSAL = ("draft_lens", PROPOSAL[2], DRAFT_SOURCE, "draft_score")
#: Waits until a function returns True, or raises.
Wait = Callable[[Callable[[], bool]], None]


def pack(arena: Arena) -> torch.Tensor:
    """int64 ``[4 + T, N]``: emitted, accepted and proposed tokens of each slot, whether it is alive, and its newest
    tokens, of which as many are of the newest run as were emitted. After these the state of ``OF_TREE``, which is of
    a run whose tier was a tree, and of ``OF_PROPOSAL``, as far as the arena has it: :class:`Columns`."""
    emitted, length, tokens = arena["emitted"], arena["length"], arena["tokens"]
    # In bounds for any slot: there are T places after max_len.
    places = (length - emitted)[:, None] + torch.arange(arena.layout.max_width, device=arena.device)
    columns = torch.stack([emitted, arena["accepted"], arena["proposed"], arena["alive"].long()])
    of_tree = [arena[name][None] for name in OF_TREE if name in arena]
    of_proposal = [_integers(arena[name]) for name in OF_PROPOSAL if name in arena]
    return torch.cat([columns, tokens.gather(1, places).T, *of_tree, *of_proposal])


def _integers(state: torch.Tensor) -> torch.Tensor:
    """``[N]`` or ``[N, K]`` as int64 ``[1, N]`` or ``[K, N]``; of floats the bits, in float64."""
    if state.is_floating_point():
        state = state.double().view(torch.int64)
    return state.reshape(len(state), -1).T


def _floats(integers: list[int]) -> tuple[float, ...]:
    """The floats whose bits these are."""
    count = len(integers)
    return struct.unpack(f"{count}d", struct.pack(f"{count}q", *integers))


@dataclass(frozen=True)
class Columns:
    """Positions in what :func:`pack` returns.

    Args:
        count: of all columns.
        of_tree: those of ``OF_TREE``; empty where no tier is a tree.
        length, nodes, source, scores: the first column of each part of ``OF_PROPOSAL``; None where the arena has none.
    """

    count: int
    of_tree: slice
    length: int | None
    nodes: int | None
    source: int | None
    scores: int | None

    @staticmethod
    def of(arena: Arena) -> Columns:
        """Those of the outcomes of ``arena``."""
        tree = 4 + arena.layout.max_width
        end = tree + len([name for name in OF_TREE if name in arena])
        of_tree, first = slice(tree, end), dict[str, int]()
        for name in OF_PROPOSAL:
            if name in arena:
                first[name] = end
                end += arena[name][0].numel()
        return Columns(end, of_tree, *(first.get(name) for name in OF_PROPOSAL))

    @property
    def proposes(self) -> bool:
        """Whether drafters propose at the end of a step."""
        return self.length is not None or self.nodes is not None

    def proposal(self, columns: list[list[int]], slot: int) -> Proposal:
        """The drafts that wait for the next step of ``slot``."""
        if not self.proposes:
            return NO_PROPOSAL
        length, nodes, source = (
            0 if at is None else columns[at][slot] for at in (self.length, self.nodes, self.source)
        )
        scores: tuple[float, ...] = ()
        if self.scores is not None and length:
            scores = _floats([column[slot] for column in columns[self.scores : self.scores + length]])
        return Proposal(length, nodes, source, scores)


class Buffer(Protocol):
    """Copies one packed outcome at a time to the host."""

    def fill(self, packed: torch.Tensor) -> None:
        """Start the copy; the next run may overwrite ``packed``."""

    def read(self) -> list[list[int]]:
        """Wait for the copy and return it."""


class HostBuffer:
    """For an arena in host memory, where a run has ended when it returns."""

    def fill(self, packed: torch.Tensor) -> None:
        """Read the results of a step."""
        self._values: list[list[int]] = packed.tolist()

    def read(self) -> list[list[int]]:
        """The results of the last :meth:`fill`."""
        return self._values


class PinnedBuffer:
    """For an arena on a GPU: copies into pinned memory while the next run executes.

    Args:
        wait: waits until the function that it is called with returns True; None waits for ever.
    """

    def __init__(self, shape: tuple[int, ...], wait: Wait | None = None) -> None:
        self._host = torch.empty(shape, dtype=torch.int64, pin_memory=True)
        self._arrived = torch.cuda.Event()
        self._wait = wait

    def fill(self, packed: torch.Tensor) -> None:
        """Begin to copy the results of a step to the host."""
        self._host.copy_(packed, non_blocking=True)
        self._arrived.record()

    def read(self) -> list[list[int]]:
        """The results of the last :meth:`fill`; it waits for them."""
        if self._wait is None:
            self._arrived.synchronize()
        else:
            self._wait(self._arrived.query)
        values: list[list[int]] = self._host.tolist()
        return values


class Outcome:
    """The outcome of one run. It can be read once, at any time."""

    def __init__(self, buffer: Buffer, free: list[Buffer]) -> None:
        self._buffer = buffer
        self._free = free

    def read(self) -> list[list[int]]:
        """The columns of :func:`pack`; from then on another run may use their buffer."""
        values = self._buffer.read()
        self._free.append(self._buffer)
        return values


class Outcomes:
    """The outcomes of runs, one copy for each run that has not been read yet.

    The number of buffers is the largest number of outcomes that were unread at once. The buffer of an outcome that is
    never read is not used again, since the device may still write to it.

    Args:
        pack: returns the tensor to copy.
        make: creates a buffer.
    """

    def __init__(self, pack: Callable[[], torch.Tensor], make: Callable[[], Buffer]) -> None:
        self._pack = pack
        self._make = make
        self._free: list[Buffer] = []

    def take(self) -> Outcome:
        """The outcome of the newest run. Returns before that run has ended."""
        buffer = self._free.pop() if self._free else self._make()
        buffer.fill(self._pack())
        return Outcome(buffer, self._free)

    @staticmethod
    def of(arena: Arena, pack: Callable[[], torch.Tensor], wait: Wait | None = None) -> Outcomes:
        """Those of ``arena``; ``wait`` as of :class:`PinnedBuffer`."""
        shape = (Columns.of(arena).count, arena.layout.max_batch + 1)
        if traits_of(arena.device).asynchronous:
            return Outcomes(pack, lambda: PinnedBuffer(shape, wait))
        return Outcomes(pack, HostBuffer)

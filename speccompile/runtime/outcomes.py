"""Results of runs for the host. They are copied to it in the order of the runs, and read later."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

import speccompile.ops  # noqa: F401  defines the op
from speccompile.graph.arena import Arena
from speccompile.graph.tree import PROPOSAL
from speccompile.modes.base import DRAFT_SOURCE
from speccompile.runtime.proposal import NO_PROPOSAL, Proposal
from speccompile.utils.devices import traits_of

#: State of tiers that are trees: the results of the chain in the tree, and the depth of the tree.
OF_TREE = ("chain_accepted", "chain_judged", "deepest_draft")
#: State of drafters that propose at the end of a step: the fields of
#: :class:`~speccompile.runtime.proposal.Proposal`, in order.
OF_PROPOSAL = ("draft_lens", PROPOSAL[2], DRAFT_SOURCE, "draft_score")
#: Waits until a function returns True, or raises.
Wait = Callable[[Callable[[], bool]], None]


def pack(arena: Arena) -> torch.Tensor:
    """Pack the results of a run into int64 ``[4 + T, N]``: emitted, accepted and proposed tokens of each slot, whether
    it is alive, and its newest tokens. The last emitted ones of these are of the newest run.

    The state of ``OF_TREE`` follows, which is only valid for a run whose tier was a tree, and that of ``OF_PROPOSAL``,
    if the arena has them. See :class:`Columns`.
    """
    core = [arena[name] for name in ("emitted", "accepted", "proposed", "alive", "length", "tokens")]
    others = [arena[name] for name in (*OF_TREE, *OF_PROPOSAL) if name in arena]
    packed: torch.Tensor = torch.ops.speccompile.pack_outcomes(*core, arena.layout.max_width, others)
    return packed


def _floats(integers: list[int]) -> tuple[float, ...]:
    """Return the floats with these bits."""
    count = len(integers)
    return struct.unpack(f"{count}d", struct.pack(f"{count}q", *integers))


@dataclass(frozen=True)
class Columns:
    """Positions of the columns in the result of :func:`pack`.

    Args:
        count: number of all columns.
        of_tree: columns of ``OF_TREE``; empty if no tier is a tree.
        length, nodes, source, scores: the first column of each part of ``OF_PROPOSAL``; None if the arena lacks it.
    """

    count: int
    of_tree: slice
    length: int | None
    nodes: int | None
    source: int | None
    scores: int | None

    @staticmethod
    def of(arena: Arena) -> Columns:
        """Return the columns for the outcomes of ``arena``."""
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
        """Return the drafts that are proposed for the next step of ``slot``."""
        if not self.proposes:
            return NO_PROPOSAL
        length, nodes, source = (
            0 if at is None else columns[at][slot] for at in (self.length, self.nodes, self.source)
        )
        scores: tuple[float, ...] = ()
        if self.scores is not None and length:
            scores = _floats([column[slot] for column in columns[self.scores : self.scores + length]])
        return Proposal(length, nodes, source, scores)


class OutcomeBuffer(Protocol):
    """Copies one packed outcome at a time to the host."""

    def fill(self, packed: torch.Tensor) -> None:
        """Start the copy; the next run may overwrite ``packed``."""

    def read(self) -> list[list[int]]:
        """Wait for the copy and return it."""


class HostBuffer:
    """A buffer for an arena in host memory, where a run has ended when it returns."""

    def fill(self, packed: torch.Tensor) -> None:
        """Read the results of a step."""
        self._values: list[list[int]] = packed.tolist()

    def read(self) -> list[list[int]]:
        """Return the results of the last :meth:`fill`."""
        return self._values


class PinnedBuffer:
    """A buffer for an arena on a GPU. It copies into pinned memory while the next run executes.

    Args:
        wait: waits until the function that it receives returns True; None waits for ever.
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
        """Wait for the results of the last :meth:`fill`, and return them."""
        if self._wait is None:
            self._arrived.synchronize()
        else:
            self._wait(self._arrived.query)
        values: list[list[int]] = self._host.tolist()
        return values


class Outcome:
    """The outcome of one run. It can be read once, at any time."""

    def __init__(self, buffer: OutcomeBuffer, free: list[OutcomeBuffer]) -> None:
        self._buffer = buffer
        self._free = free

    def read(self) -> list[list[int]]:
        """Return the columns of :func:`pack`. Another run may then reuse their buffer."""
        values = self._buffer.read()
        self._free.append(self._buffer)
        return values


class Outcomes:
    """The outcomes of runs, with one copy for each run that has not been read yet.

    The number of buffers is the largest number of outcomes that were unread at once. The buffer of an outcome that is
    never read is not used again, since the device may still write to it.

    Args:
        pack: returns the tensor to copy.
        create: creates a buffer.
    """

    def __init__(self, pack: Callable[[], torch.Tensor], create: Callable[[], OutcomeBuffer]) -> None:
        self._pack = pack
        self._create = create
        self._free: list[OutcomeBuffer] = []

    def take(self) -> Outcome:
        """Return the outcome of the newest run, before that run has ended."""
        buffer = self._free.pop() if self._free else self._create()
        buffer.fill(self._pack())
        return Outcome(buffer, self._free)

    @staticmethod
    def of(arena: Arena, pack: Callable[[], torch.Tensor], wait: Wait | None = None) -> Outcomes:
        """Return the outcomes of ``arena``, with ``wait`` for :class:`PinnedBuffer`."""
        shape = (Columns.of(arena).count, arena.layout.max_batch + 1)
        if traits_of(arena.device).asynchronous:
            return Outcomes(pack, lambda: PinnedBuffer(shape, wait))
        return Outcomes(pack, HostBuffer)

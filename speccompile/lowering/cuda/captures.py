"""Tiers as CUDA graphs over one pool: each is captured once, and run by one launch."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from speccompile.graph.arena import Arena
from speccompile.lowering.cuda.addresses import Reads, address_of, check_addresses, check_reads
from speccompile.lowering.cuda.device import Graph, GraphDevice
from speccompile.lowering.cuda.uncapturable import cannot_capture
from speccompile.lowering.tier import Executables, Tier

#: Set to 1, every capture and every replay checks the addresses that the graphs hold.
CHECK = "SPECCOMPILE_CHECK_GRAPHS"

Weights = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Footprint:
    """Bytes that a tier took when those before it were there: of the pool, and of the device in all, which is the
    pool's and what CUDA keeps of the graph itself."""

    pool: int
    device: int


class Captured:
    """A tier's step as a graph: a replay reads the tensors that were captured, and ignores its arguments.

    The graph knows addresses alone, so ``kept`` holds what they belong to: aliases of these tensors, which share their
    storages, and the function that was captured.
    """

    def __init__(self, graph: Graph, kept: tuple[object, ...], check: Callable[[], None] | None = None) -> None:
        self._graph = graph
        self._kept = kept
        self._check = check

    def __call__(self, *_: torch.Tensor) -> None:
        if self._check is not None:
            self._check()
        self._graph.replay()


class Captures:
    """All graphs of one wrap.

    Replays may follow one another in any order: a step reads and writes weights and arena, and nothing in the pool
    lives longer than its step.

    Args:
        arena: of the tiers.
        device: where they are captured.
        weights: the model's own, by path, as they are when it is called.
        check: whether addresses are looked at; None is what the environment variable says.
    """

    def __init__(self, arena: Arena, device: GraphDevice, weights: Weights, check: bool | None = None) -> None:
        self._arena = arena
        self._device = device
        self._weights = weights
        self._check = os.environ.get(CHECK) == "1" if check is None else check
        #: By tier and chunk, in the order of capture.
        self.footprints: dict[str, Footprint] = {}
        #: Of the pool, after the newest capture.
        self.pool_bytes = 0

    def of(self, executables: Executables) -> Executables:
        """The same with every tier and prompt chunk captured.

        Raises:
            CannotCapture: one waits for the host, or makes a size of a value; names the node.
            CapturedElsewhere: with ``check``, one reads what could move or be freed.
        """
        captured = self.all([*executables.tiers.values(), *executables.prefill.values()])
        return Executables(
            {name: captured[tier.name] for name, tier in executables.tiers.items()},
            {name: captured[tier.name] for name, tier in executables.prefill.items()},
        )

    def all(self, tiers: Iterable[Tier]) -> dict[str, Tier]:
        """All of ``tiers`` captured, by name. Raises as :meth:`of`."""
        with self._arena.parked(), _no_collection():
            return {tier.name: self._capture(tier) for tier in largest_first(tiers)}

    def function(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """``compute`` as a graph; what is returned is one tensor, which every call overwrites."""
        result = torch.empty_like(compute())

        def run() -> None:
            result.copy_(compute())

        with _no_collection():
            self._device.warm_up(run)
            graph = self._device.capture(run)

        def replay() -> torch.Tensor:
            graph.replay()
            return result

        return replay

    def explain(self) -> str:
        """A line for ``explain()``: number of graphs and memory."""
        first, *others = self.footprints.values()
        extra = max((footprint.device for footprint in others), default=0)
        checked = f"; addresses are checked at every replay ({CHECK}=1)" if self._check else ""
        return (
            f"{len(self.footprints)} graphs over one pool of {_mib(self.pool_bytes)}; the first one took "
            f"{_mib(first.device)} of the device, every other one at most {_mib(extra)}{checked}"
        )

    def _capture(self, tier: Tier) -> Tier:
        if tier.drafter is not None:
            # A separate graph, which is launched before.
            drafter = self._capture(tier.drafter)
            return replace(self._capture(replace(tier, drafter=None)), drafter=drafter)
        before = self._device.memory()
        try:
            self._device.warm_up(tier.run)
            graph = self._device.capture(tier.run)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise cannot_capture(tier, error, self._device) from error
        # A graph's first launch is what takes it to the device.
        graph.replay()
        after = self._device.memory()
        self.pool_bytes = after.pool
        self.footprints[tier.name] = Footprint(after.pool - before.pool, before.free - after.free)
        kept = (tier.executable, *[tensor.detach() for tensor in tier.arguments])
        return replace(tier, executable=Captured(graph, kept, self._checker(tier) if self._check else None))

    def _checker(self, tier: Tier) -> Callable[[], None]:
        reads = Reads(tier.arena.device.type)
        with reads:
            self._device.rehearse(tier.run)
        check_reads(tier, reads, self._device.pool_ranges())
        places = [address_of(tensor) for tensor in tier.arguments]
        return lambda: check_addresses(tier, places, self._weights())


def largest_first(tiers: Iterable[Tier]) -> list[Tier]:
    """Of most tokens first, so that the others find their blocks in the pool."""
    return sorted(tiers, key=lambda tier: tier.key.tokens, reverse=True)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """What the garbage collector finds may be CUDA's, and freeing that during a capture would spoil it."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"

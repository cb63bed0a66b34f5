"""Tiers as CUDA graphs over one pool: each is captured once, and runs with one launch."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from speccompile.graph.arena import Arena
from speccompile.lowering.cuda.addresses import StorageReads, address_of, check_addresses, check_reads
from speccompile.lowering.cuda.device import Graph, GraphDevice
from speccompile.lowering.cuda.uncapturable import cannot_capture
from speccompile.lowering.tier import Executables, Tier

#: If this variable is 1, every capture and every replay checks the addresses in the graphs.
CHECK = "SPECCOMPILE_CHECK_GRAPHS"

Weights = Callable[[], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Footprint:
    """Bytes that a tier added after the tiers before it: bytes of the pool, and bytes of the device. The latter
    include the pool's, and CUDA's memory for the graph itself."""

    pool: int
    device: int


class Captured:
    """A tier's step as a graph. A replay reads the captured tensors, and ignores its arguments.

    The graph only has addresses, so ``kept`` keeps their owners alive: aliases of the tensors, which share their
    storages, and the captured function.
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

    Replays may follow one another in any order: a step reads and writes weights and arena, and no tensor of the pool
    outlives its step.

    Args:
        arena: the arena of the tiers.
        device: the device on which they are captured.
        weights: returns the model's own weights, by path, at the time of the call.
        check: whether addresses are checked; None means the environment variable decides.
    """

    def __init__(self, arena: Arena, device: GraphDevice, weights: Weights, check: bool | None = None) -> None:
        self._arena = arena
        self._device = device
        self._weights = weights
        self._check = os.environ.get(CHECK) == "1" if check is None else check
        #: Footprints by tier and chunk, in the order of capture.
        self.footprints: dict[str, Footprint] = {}
        #: Bytes of the pool after the newest capture.
        self.pool_bytes = 0

    def of(self, executables: Executables) -> Executables:
        """Return ``executables`` with every tier and prompt chunk captured.

        Raises:
            CannotCapture: a step waits for the host, or computes a size from a value; the error names the node.
            CapturedElsewhere: with ``check``, a step reads a tensor that could move or be freed.
        """
        captured = self.all([*executables.tiers.values(), *executables.prefill.values()])
        return Executables(
            {name: captured[tier.name] for name, tier in executables.tiers.items()},
            {name: captured[tier.name] for name, tier in executables.prefill.items()},
        )

    def all(self, tiers: Iterable[Tier]) -> dict[str, Tier]:
        """Capture all of ``tiers``, and return them by name. Errors are those of :meth:`of`."""
        with self._arena.parked(), _no_collection():
            return {tier.name: self._capture(tier) for tier in largest_first(tiers)}

    def function(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        """Capture ``compute`` as a graph. The result is one tensor, which every call overwrites."""
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
        """Describe the number of graphs and their memory in one line."""
        first, *others = self.footprints.values()
        extra = max((footprint.device for footprint in others), default=0)
        checked = f"; addresses are checked at every replay ({CHECK}=1)" if self._check else ""
        return (
            f"{len(self.footprints)} graphs over one pool of {_mib(self.pool_bytes)}; the first one needs "
            f"{_mib(first.device)} of the device, each other one at most {_mib(extra)}{checked}"
        )

    def _capture(self, tier: Tier) -> Tier:
        if tier.drafter is not None:
            # The drafter is a separate graph, launched before the step.
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
        # The first launch uploads a graph to the device.
        graph.replay()
        after = self._device.memory()
        self.pool_bytes = after.pool
        self.footprints[tier.name] = Footprint(after.pool - before.pool, before.free - after.free)
        kept = (tier.executable, *[tensor.detach() for tensor in tier.arguments])
        return replace(tier, executable=Captured(graph, kept, self._checker(tier) if self._check else None))

    def _checker(self, tier: Tier) -> Callable[[], None]:
        reads = StorageReads(tier.arena.device.type)
        with reads:
            self._device.rehearse(tier.run)
        check_reads(tier, reads, self._device.pool_ranges())
        addresses = [address_of(tensor) for tensor in tier.arguments]
        return lambda: check_addresses(tier, addresses, self._weights())


def largest_first(tiers: Iterable[Tier]) -> list[Tier]:
    """Sort tiers by tokens, the largest first. Smaller tiers then reuse its blocks in the pool."""
    return sorted(tiers, key=lambda tier: tier.key.tokens, reverse=True)


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Disable the garbage collector during a capture: it could free CUDA memory, which would invalidate the capture."""
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

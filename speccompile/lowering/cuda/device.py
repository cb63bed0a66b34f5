"""What captures ask of CUDA: a stream, a pool, and a step that runs or is captured in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from speccompile.utils.torch_private import end_pool


@dataclass(frozen=True)
class Memory:
    """Bytes: what the pool has reserved, and what is free on the whole device."""

    pool: int
    free: int


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Launch it on the current stream."""


class GraphDevice(Protocol):
    """One pool and one stream. Tests stand in for it where there is no GPU."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run it until a capture finds everything made: kernels, handles, workspaces."""

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Run it where it will be captured."""

    def capture(self, run: Callable[[], Any]) -> Graph:
        """What ``run`` launches, unlaunched. What is wrong with it is raised as it comes."""

    def memory(self) -> Memory:
        """Memory of the graphs' pool, and free memory of the device, in bytes."""

    def pool_ranges(self) -> list[range]:
        """Addresses of the pool."""


class CudaDevice:
    """The process's capture stream on one GPU, and a pool of its own on that stream.

    The allocator keeps blocks by stream, so captures share memory only if they, and what ran before them in the pool,
    were all on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _new_pool(device)
        self._stream, self._workspaces = _stream_and_workspaces(device)

    def warm_up(self, run: Callable[[], Any]) -> None:
        # Outside of the pool first: what compiles and tunes kernels allocates buffers that are not needed again.
        run()
        with self._inside(self._workspaces):
            # torch keeps cuBLAS's workspace of a thread and stream, which graphs hold the address of, until any graph
            # of that stream ends, or Inductor's own CUDA graphs begin. Here only the next workspace comes to its place.
            square = torch.ones(16, 16, device=self._device)
            torch.mm(square, square)
        self.rehearse(run)

    def rehearse(self, run: Callable[[], Any]) -> None:
        with self._inside(self._pool):
            run()

    def capture(self, run: Callable[[], Any]) -> Graph:
        self._make_room()
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph: when a capture fails that leaves the capture stream current.
        with torch.cuda.stream(self._stream):
            handle: Any = self._pool.id
            try:
                # Other threads may go on using CUDA meanwhile.
                graph.capture_begin(pool=handle, capture_error_mode="thread_local")
                run()
            except BaseException:
                self._abandon(graph)
                raise
            try:
                graph.capture_end()
            except BaseException:
                self._clean_up(graph)
                raise
        return graph

    def memory(self) -> Memory:
        self._make_room()
        free, _ = torch.cuda.mem_get_info(self._device)
        return Memory(sum(map(len, self.pool_ranges())), free)

    def pool_ranges(self) -> list[range]:
        segments = [segment for segment in self._pool.snapshot() if segment["device"] == self._device.index]
        return [range(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]

    @contextlib.contextmanager
    def _inside(self, pool: torch.cuda.MemPool) -> Iterator[None]:
        self._make_room()
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(pool, self._device):
            yield
        torch.cuda.synchronize(self._device)

    def _make_room(self) -> None:
        """While allocations go to a pool, torch gives no cached blocks back when memory runs out (pytorch#159674)."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._clean_up(graph)

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """torch stops where CUDA refuses the end of a capture (2.11 to 2.13): its allocators would go on for good with
        this pool, and the default generator would believe in the capture until another one has ended."""
        _refused.append(graph)
        with contextlib.suppress(RuntimeError):
            end_pool(self._device, self._pool)
        self._pool = _new_pool(self._device)
        another = torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        torch.ones((), device=self._device)
        another.capture_end()


#: Their ends were refused. The allocator of pinned memory goes on asking them whether an allocation is theirs, and
#: nothing that Python can call would end that (torch 2.11).
_refused: list[torch.cuda.CUDAGraph] = []


def _new_pool(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


@functools.cache
def _stream_and_workspaces(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
    """For all captures of the process: cuBLAS takes a workspace for each stream."""
    return torch.cuda.Stream(device), _new_pool(device)

"""CUDA for captures: a stream, a pool, and functions that run or capture a step in them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from speccompile.utils.torch_private import end_pool


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes that the pool has reserved, and bytes that are free on the whole device."""

    pool: int
    free: int


class Graph(Protocol):
    """A captured CUDA graph."""

    def replay(self) -> None:
        """Launch the graph on the current stream."""


class GraphDevice(Protocol):
    """One pool and one stream. Tests replace it on machines without a GPU."""

    def warm_up(self, run: Callable[[], Any]) -> None:
        """Run ``run`` until kernels, handles and workspaces exist, so the capture creates none."""

    def rehearse(self, run: Callable[[], Any]) -> None:
        """Run ``run`` in the stream and pool of the capture, without capturing it."""

    def capture(self, run: Callable[[], Any]) -> Graph:
        """Capture the launches of ``run`` without executing them. Errors of ``run`` are raised unchanged."""

    def memory(self) -> DeviceMemory:
        """Return the memory of the graphs' pool, and the free memory of the device, in bytes."""

    def pool_ranges(self) -> list[range]:
        """Return the addresses of the pool."""


class CudaDevice:
    """The process's capture stream on one GPU, and a separate pool on that stream.

    The allocator keeps blocks by stream. Captures therefore share memory only if they, and all earlier work in the
    pool, ran on one stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = _new_pool(device)
        self._stream, self._workspaces = _stream_and_workspaces(device)

    def warm_up(self, run: Callable[[], Any]) -> None:
        # The first run is outside of the pool: compiling and tuning kernels allocates buffers that are used only once.
        run()
        with self._inside(self._workspaces):
            # Graphs hold the address of cuBLAS's workspace for this thread and stream. torch frees the workspace when a
            # graph of that stream ends, or Inductor's own CUDA graphs begin. In this pool only the next workspace can
            # reuse its memory.
            square = torch.ones(16, 16, device=self._device)
            torch.mm(square, square)
        self.rehearse(run)

    def rehearse(self, run: Callable[[], Any]) -> None:
        with self._inside(self._pool):
            run()

    def capture(self, run: Callable[[], Any]) -> Graph:
        self._give_back_memory()
        graph = torch.cuda.CUDAGraph()
        # torch.cuda.graph is not used, since it leaves the capture stream current when a capture fails.
        with torch.cuda.stream(self._stream):
            handle: Any = self._pool.id
            try:
                # Other threads may continue to use CUDA meanwhile.
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

    def memory(self) -> DeviceMemory:
        self._give_back_memory()
        free, _ = torch.cuda.mem_get_info(self._device)
        return DeviceMemory(sum(map(len, self.pool_ranges())), free)

    def pool_ranges(self) -> list[range]:
        segments = [segment for segment in self._pool.snapshot() if segment["device"] == self._device.index]
        return [range(segment["address"], segment["address"] + segment["total_size"]) for segment in segments]

    @contextlib.contextmanager
    def _inside(self, pool: torch.cuda.MemPool) -> Iterator[None]:
        self._give_back_memory()
        with torch.cuda.stream(self._stream), torch.cuda.use_mem_pool(pool, self._device):
            yield
        torch.cuda.synchronize(self._device)

    def _give_back_memory(self) -> None:
        """Release cached blocks. While allocations go to a pool, torch does not release them when memory is full
        (pytorch#159674)."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        try:
            graph.capture_end()
        except RuntimeError:
            self._clean_up(graph)

    def _clean_up(self, graph: torch.cuda.CUDAGraph) -> None:
        """Repair torch after CUDA refused the end of a capture (torch 2.11 to 2.13). Otherwise its allocators would use
        this pool for ever, and the default generator would stay in capture mode until another capture has ended."""
        _refused.append(graph)
        with contextlib.suppress(RuntimeError):
            end_pool(self._device, self._pool)
        self._pool = _new_pool(self._device)
        another = torch.cuda.CUDAGraph()
        another.capture_begin(capture_error_mode="thread_local")
        torch.ones((), device=self._device)
        another.capture_end()


#: Graphs whose end was refused. The allocator of pinned memory continues to query them, and no Python function stops
#: that (torch 2.11), so they are kept alive.
_refused: list[torch.cuda.CUDAGraph] = []


def _new_pool(device: torch.device) -> torch.cuda.MemPool:
    with torch.cuda.device(device):
        return torch.cuda.MemPool()


@functools.cache
def _stream_and_workspaces(device: torch.device) -> tuple[torch.cuda.Stream, torch.cuda.MemPool]:
    """Return the stream and pool of all captures of the process. They are shared, since cuBLAS allocates a workspace
    for each stream."""
    return torch.cuda.Stream(device), _new_pool(device)

"""The threads that a step's ops run on: those of the C++ ops' own pool, or OpenMP's."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from speccompile.utils.forks import before_fork

# OpenMP 5.0: omp_pause_soft keeps what the program set.
PAUSE_SOFT = 1
TORCH_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}


@contextlib.contextmanager
def in_pool(tokens: int) -> Iterator[None]:
    """Run the C++ ops of the calling thread in their own pool, and OpenMP's regions on the calling thread alone.

    The pool uses ``torch.get_num_threads()`` threads. The C++ ops must be loaded. Wide steps stay on OpenMP's threads:
    what Inductor writes cannot run in the pool, and would take too long on one thread (``csrc/base/ops/share.cpp``).

    Args:
        tokens: that the step reads, of all rows.
    """
    enter, leave = _pool()
    entered = ctypes.c_bool()
    try:
        enter(tokens, entered)
        yield
    finally:
        if entered:
            leave(entered)


@contextlib.contextmanager
def out_of_pool() -> Iterator[None]:
    """Run a caller's code inside a step as outside of it, on all of torch's threads.

    A number of threads that the caller's code sets is valid for the rest of the step and after it.
    """
    if not _pool.cache_info().currsize:
        # No thread has entered the pool. The C++ ops may not even be loaded.
        yield
        return
    enter, leave = _pool()
    left = ctypes.c_bool()
    try:
        leave(left)
        yield
    finally:
        if left:
            # A step that was narrow enough still is.
            enter(0, left)


@functools.cache
def _pool() -> tuple[Callable[[int, ctypes.c_bool], None], Callable[[ctypes.c_bool], None]]:
    # The library was loaded with its symbols visible to all.
    library = ctypes.PyDLL(None)
    enter, leave = library.speccompile_enter_pool, library.speccompile_leave_pool
    enter.argtypes, enter.restype = [ctypes.c_int64, ctypes.POINTER(ctypes.c_bool)], None
    leave.argtypes, leave.restype = [ctypes.POINTER(ctypes.c_bool)], None
    return enter, leave


def release_workers() -> None:
    """Let go of the calling thread's OpenMP workers. Its next parallel operation makes new ones (under 0.1 ms a few).

    Between two operations workers spin for a moment, which is what makes the hundreds of short operations of a step
    fast. libgomp lets them only while it has no more threads than the machine has cores, counting those that wait
    for the next operation of *another* thread (``gomp_throttled_spin_count_var`` in its env.c): a step in a second
    thread then takes two to three times as long. So each thread lets go of its workers when it has done its part.

    A process that forks lets go of them too: a child has no threads but the one that forked, and would wait for the
    others in its first parallel operation. It makes workers of its own instead.

    Nothing happens where torch's OpenMP is not known.
    """
    if (pause := _pause()) is not None:
        pause(PAUSE_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    name = TORCH_LIBRARIES.get(sys.platform)
    if name is None:
        return None
    # Looked up through torch's own library, which leads to the OpenMP that torch runs on.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return getattr(library, "omp_pause_resource_all", None)


before_fork(release_workers)

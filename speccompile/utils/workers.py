"""The threads of a step's ops: the pool of the C++ ops, or OpenMP's threads."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from speccompile.utils.forks import before_fork

# OpenMP 5.0: omp_pause_soft keeps the settings of the program.
PAUSE_SOFT = 1
TORCH_LIBRARIES = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib"}


@contextlib.contextmanager
def in_pool(tokens: int) -> Iterator[None]:
    """Run the C++ ops of the calling thread in their own pool, and OpenMP's regions only on the calling thread.

    The pool uses ``torch.get_num_threads()`` threads. The C++ ops must be loaded. Wide steps stay on OpenMP's threads:
    Inductor's code cannot run in the pool, and would be too slow on one thread (``csrc/base/ops/share.cpp``).

    Args:
        tokens: number of tokens of the step, over all rows.
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
    """Run the caller's code inside a step on all of torch's threads, as outside of it.

    If that code sets a number of threads, it applies to the rest of the step and afterwards.
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
            # Zero tokens: a step that was narrow enough for the pool still is.
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
    """End the calling thread's OpenMP workers. Its next parallel operation creates new ones, in under 0.1 ms for a few.

    Workers spin for a moment between two operations, so the hundreds of short operations of a step are fast.
    libgomp lets them spin only while it has no more threads than the machine has cores. It counts threads that wait for
    the next operation of *another* thread (``gomp_throttled_spin_count_var`` in its env.c). A step in a second thread
    is then two to three times as slow. Each thread therefore ends its workers when it has done its part.

    A process that forks also ends them. A child only has the thread that forked, and would wait for the others in its
    first parallel operation. It creates new workers instead.

    Nothing happens if torch's OpenMP is unknown.
    """
    if (pause := _pause()) is not None:
        pause(PAUSE_SOFT)


@functools.cache
def _pause() -> Callable[[int], int] | None:
    name = TORCH_LIBRARIES.get(sys.platform)
    if name is None:
        return None
    # Looked up through torch's own library, which finds the OpenMP that torch uses.
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / name))
    return getattr(library, "omp_pause_resource_all", None)


before_fork(release_workers)

"""Freed memory goes back to the system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
import subprocess
import sys
from pathlib import Path

import pytest

from speccompile.serve import freed_memory
from speccompile.serve.freed_memory import return_freed_memory, share_arenas, trim

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
MIB = 2**20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@glibc
def test_parts_that_are_free_between_used_ones_are_returned() -> None:
    rng, free = random.Random(0), trim()
    assert free is not None
    # Too small to be returned when they are freed.
    kept = [bytes(rng.randrange(4_000, 60_000)) for _ in range(4_000)]
    del kept[::2]
    before = resident_bytes()
    free()
    assert resident_bytes() < before - 20 * MIB
    assert len(kept) == 2_000


#: Many threads allocate at once, and then the arenas are counted.
THREADS = """
import ctypes, re, sys, threading
from speccompile.serve.freed_memory import share_arenas
if sys.argv[1] == "shared":
    share_arenas()
begin = threading.Barrier(12)
def allocate():
    begin.wait()
    for _ in range(300):
        [bytes(3_000) for _ in range(100)]
threads = [threading.Thread(target=allocate) for _ in range(12)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(len(re.findall("<heap nr=", open(sys.argv[2]).read())))
"""


@glibc
def test_threads_of_a_server_share_arenas(tmp_path: Path) -> None:
    def arenas(kind: str) -> int:
        command = [sys.executable, "-c", THREADS, kind, str(tmp_path / kind)]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # Arenas of threads that importing packages has started may be there before.
    assert arenas("shared") <= freed_memory.ARENAS + 1 < arenas("separate")


def test_it_goes_on_until_the_server_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    monkeypatch.setattr(freed_memory, "SECONDS", 0.01)
    monkeypatch.setattr(freed_memory, "trim", lambda: lambda: calls.append(None))

    async def until(enough: int) -> None:
        task = asyncio.create_task(return_freed_memory())
        while len(calls) < enough:
            await asyncio.sleep(0.01)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(until(3))
    assert len(calls) >= 3


def test_another_c_library_keeps_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    assert trim() is None
    share_arenas()
    asyncio.run(return_freed_memory())

"""Freed memory goes back to the system."""

from __future__ import annotations

import asyncio
import contextlib
import os
import platform
import random
from pathlib import Path

import pytest

from speccompile.serve import freed_memory
from speccompile.serve.freed_memory import return_freed_memory, trim

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
    asyncio.run(return_freed_memory())

"""Pages of mapped files are given back to the system, where nothing wrote to them."""

from __future__ import annotations

import mmap
import platform
from pathlib import Path

import numpy as np
import pytest
import torch

from speccompile import wrap
from speccompile.utils.memory import release_file_pages, trim_heap
from support.tiny import tiny_llama

PAGES = 64


def resident(tensor: torch.Tensor) -> int:
    """Bytes of the mapping that ``tensor`` lies in that are in memory."""
    inside, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            low, high = (int(address, 16) for address in head.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and head == "Rss:":
            size = int(line.split()[1]) * 1024
    return size


linux = pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="Linux reports which pages are in memory")


@linux
def test_pages_of_a_file_are_given_back(tmp_path: Path) -> None:
    size = PAGES * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(range(256)) * (size // 256))
    whole = torch.from_file(str(tmp_path / "weights"), shared=False, size=size, dtype=torch.uint8)
    wanted = whole.clone()
    assert resident(whole) == size
    # Not the pages that it shares with what is beside it.
    release_file_pages(whole[1 : size - 1])
    assert resident(whole) == 2 * mmap.PAGESIZE
    assert torch.equal(whole, wanted)


@linux
def test_pages_that_were_written_to_stay(tmp_path: Path) -> None:
    size = PAGES * mmap.PAGESIZE
    (tmp_path / "weights").write_bytes(bytes(size))
    whole = torch.from_file(str(tmp_path / "weights"), shared=False, size=size, dtype=torch.uint8)
    whole[5 * mmap.PAGESIZE + 7] = 3
    wanted = whole.clone()
    release_file_pages(whole)
    assert resident(whole) == mmap.PAGESIZE
    assert torch.equal(whole, wanted)


@linux
def test_memory_of_no_file_stays() -> None:
    whole = torch.from_numpy(np.frombuffer(mmap.mmap(-1, PAGES * mmap.PAGESIZE), dtype=np.uint8))
    whole.fill_(7)
    alone = torch.full((PAGES * mmap.PAGESIZE,), 7, dtype=torch.uint8)
    for tensor in (whole, alone):
        release_file_pages(tensor)
        assert bool((tensor == 7).all())


def process_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@linux
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another libc")
def test_freed_memory_before_an_allocation_in_use_is_given_back() -> None:
    blocks = [torch.zeros(16_000) for _ in range(1000)]
    last = blocks.pop()
    used = process_bytes()
    blocks.clear()
    trim_heap()
    assert process_bytes() < used - 48 * 2**20
    assert not last.any()


def test_close_gives_freed_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    trims: list[bool] = []
    monkeypatch.setattr("speccompile.speculator.base.trim_heap", lambda: trims.append(spec.closed))
    spec = wrap(tiny_llama(), tiers=(0,), max_len=32, backend="eager")
    assert trims == []
    spec.close()
    assert trims == [True]

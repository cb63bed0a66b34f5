"""What fills huge pages is moved to them, and nothing else changes."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest
import torch

from speccompile.utils import huge_pages
from speccompile.utils.huge_pages import filled_pages, use_huge_pages

SIZE = 2 << 20


def in_huge_pages(address: int) -> int:
    """Bytes of the mapping at ``address`` that lie in huge pages."""
    inside, size = False, 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if not head.endswith(":"):
            low, high = (int(part, 16) for part in head.split("-"))
            inside = low <= address < high
        elif inside and head == "AnonHugePages:":
            size = int(line.split()[1]) * 1024
    return size


def test_a_tensor_is_moved_and_keeps_its_values() -> None:
    region = mmap.mmap(-1, 4 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    # What a file or an earlier test left to the system to decide.
    region.madvise(mmap.MADV_NOHUGEPAGE)
    whole.copy_(torch.arange(4 * SIZE, dtype=torch.int64))
    region.madvise(mmap.MADV_HUGEPAGE)
    wanted, address = whole.clone(), whole.data_ptr()
    before = in_huge_pages(address)
    moved = use_huge_pages([whole])
    if moved == 0:
        pytest.skip("this system has no huge pages for a process that asks: Linux before 6.1, a setting, or none free")
    assert moved >= 3 * SIZE
    assert in_huge_pages(address) - before == moved
    assert torch.equal(whole, wanted) and whole.data_ptr() == address


def test_pages_are_those_that_allocations_fill_together() -> None:
    half = SIZE // 2
    assert list(filled_pages([(0, half), (half + 64, SIZE)], SIZE)) == [0]
    assert list(filled_pages([(0, half)], SIZE)) == []
    assert list(filled_pages([(SIZE - 64, 3 * SIZE)], SIZE)) == [1, 2, 3]
    # A weight that two modules share is there once.
    assert list(filled_pages([(0, half), (0, half)], SIZE)) == []


def test_a_system_that_forbids_them_is_obeyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "enabled").write_text("always madvise [never]\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{SIZE}\n")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert use_huge_pages([torch.ones(4 * SIZE, dtype=torch.uint8)]) == 0
    (tmp_path / "hpage_pmd_size").unlink()
    assert use_huge_pages([torch.ones(4 * SIZE, dtype=torch.uint8)]) == 0

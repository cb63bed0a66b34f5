"""What fills huge pages is moved to them, and nothing else changes."""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from speccompile import wrap
from speccompile.utils import huge_pages
from speccompile.utils.huge_pages import filled_pages, huge_page_size, use_huge_pages
from support.tiny import tiny_llama

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


def has_free_huge_pages() -> bool:
    """Whether this system gives a process that asks for it a huge page: as the package asks, but for one page alone."""
    if sys.platform != "linux" or huge_page_size() != SIZE:
        return False
    region = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    region.write(bytes(2 * SIZE))
    address = torch.frombuffer(region, dtype=torch.uint8).data_ptr()
    libc = ctypes.CDLL(None)
    return libc.madvise(ctypes.c_void_p(-(-address // SIZE) * SIZE), ctypes.c_size_t(SIZE), 25) == 0


@pytest.mark.skipif(not has_free_huge_pages(), reason="no huge pages: not Linux 6.1, a setting, or none free")
def test_a_tensor_is_moved_and_keeps_its_values() -> None:
    region = mmap.mmap(-1, 4 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    whole = torch.frombuffer(region, dtype=torch.uint8)
    # Written to while they are forbidden, it lies in small pages.
    region.madvise(mmap.MADV_NOHUGEPAGE)
    whole.copy_(torch.arange(4 * SIZE, dtype=torch.int64))
    wanted, address = whole.clone(), whole.data_ptr()
    assert in_huge_pages(address) == 0
    region.madvise(mmap.MADV_HUGEPAGE)
    moved = use_huge_pages([whole])
    assert in_huge_pages(address) >= moved > 0
    assert torch.equal(whole, wanted) and whole.data_ptr() == address


def test_pages_are_those_that_allocations_fill_together() -> None:
    half = SIZE // 2
    assert list(filled_pages([(0, half), (half + 64, SIZE)], SIZE)) == [0]
    assert list(filled_pages([(0, half)], SIZE)) == []
    assert list(filled_pages([(SIZE - 64, 3 * SIZE)], SIZE)) == [1, 2, 3]
    # A weight that two modules share is there once.
    assert list(filled_pages([(0, half), (0, half)], SIZE)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="settings of Linux")
def test_a_system_s_settings_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    (tmp_path / "hpage_pmd_size").write_text(f"{SIZE}\n")
    assert huge_page_size() is None
    for setting, size in {
        "always [madvise] never": SIZE,
        "[always] madvise never": SIZE,
        "always [never]": None,
    }.items():
        (tmp_path / "enabled").write_text(f"{setting}\n")
        assert huge_page_size() == size
    assert use_huge_pages([torch.ones(4 * SIZE, dtype=torch.uint8)]) == 0


def test_it_stops_where_each_page_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses that are nobody's."""
    monkeypatch.setattr(huge_pages, "huge_page_size", lambda: SIZE)
    asked: list[int] = []

    def pages(ranges: object, size: int) -> Iterator[int]:
        for page in range(100):
            asked.append(page)
            yield page

    monkeypatch.setattr(huge_pages, "filled_pages", pages)
    assert use_huge_pages([]) == 0 and len(asked) <= 4


@pytest.mark.skipif(huge_page_size() is None, reason="this system has none")
def test_packs_of_target_and_drafter_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[list[int]] = []
    monkeypatch.setattr(
        "speccompile.compiler.build.use_huge_pages",
        lambda tensors: given.append(sorted(tensor.data_ptr() for tensor in tensors)),
    )
    model = tiny_llama()
    sizes: dict[str, Any] = {"tiers": (0, 1), "max_len": 31, "max_batch": 1}
    with wrap(model, "draft_target", draft=tiny_llama(seed=1), backend="inductor", **sizes) as spec:
        packs = [spec._build.packs, *spec._build.packs.followers]
        assert len(packs) == 2 and all(len(of_one) > 0 for of_one in packs)
        assert given == [sorted(tensor.data_ptr() for of_one in packs for tensor in of_one.tensors())]
        assert "huge pages" in spec.build_seconds
    with wrap(model, "none", tiers=(0,), max_len=31, backend="eager") as spec:
        assert len(given) == 1 and "huge pages" not in spec.build_seconds

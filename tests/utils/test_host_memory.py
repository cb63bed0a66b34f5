"""Free memory of the machine, and of a container with a limit."""

from __future__ import annotations

from pathlib import Path

import pytest

from speccompile.errors import HostMemoryFull
from speccompile.utils import host_memory
from speccompile.utils.host_memory import check_host_memory, free_host_memory
from support.errors import raises


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 GiB, 3 of them free, without control groups."""
    (tmp_path / "meminfo").write_text("MemTotal:        8388608 kB\nMemFree: 1 kB\nMemAvailable:    3145728 kB\n")
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_memory, "_GROUP", tmp_path)
    return tmp_path


def limit(group: Path, most: str, used: int, file: int) -> None:
    (group / "memory.max").write_text(f"{most}\n")
    (group / "memory.current").write_text(f"{used}\n")
    (group / "memory.stat").write_text(f"anon 1\nfile {file}\n")


def test_what_the_system_reports(machine: Path) -> None:
    assert free_host_memory() == (3 << 30, 8 << 30)
    limit(machine, "max", 1 << 30, 0)
    assert free_host_memory() == (3 << 30, 8 << 30)


def test_pages_of_files_in_a_container_are_free(machine: Path) -> None:
    limit(machine, str(2 << 30), used=3 << 29, file=1 << 30)
    assert free_host_memory() == (3 << 29, 2 << 30)


def test_a_system_without_the_file_is_not_checked(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert free_host_memory() is None
    check_host_memory("weights", 1 << 60)


def test_too_little_is_an_error_with_the_numbers(machine: Path) -> None:
    check_host_memory("weights", 3 << 30)
    with raises(HostMemoryFull, what="weights", needed="3.5 GiB", free="3.0 GiB", total="8.0 GiB"):
        check_host_memory("weights", 7 << 29)


def test_this_machine_has_memory() -> None:
    found = free_host_memory()
    assert found is None or 0 < found[0] <= found[1]

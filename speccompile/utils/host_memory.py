"""Free memory of this machine, or of the control group of the process."""

from __future__ import annotations

import os
from pathlib import Path

from speccompile.errors import HostMemoryFull
from speccompile.utils.device_memory import sized

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


def free_host_memory() -> tuple[int, int] | None:
    """Return the bytes that can be allocated without swapping, and all bytes; None if the system does not report them.

    Pages of files count as free. In a control group (a container with a limit) both are at most the limit's.
    """
    if not _MEMINFO.is_file():
        return None
    lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
    if not {"MemAvailable", "MemTotal"} <= lines.keys():
        return None
    free, total = (int(lines[name].split()[0]) * 1024 for name in ("MemAvailable", "MemTotal"))
    limit = _read_bytes(_GROUP / "memory.max")
    if limit is not None:
        used = _read_bytes(_GROUP / "memory.current") or 0
        files = dict(line.split() for line in _lines(_GROUP / "memory.stat")).get("file", "0")
        free, total = min(free, limit - used + int(files)), min(total, limit)
    return free, total


def check_host_memory(what: str, needed: int) -> None:
    """Check before a long work that the machine has enough memory.

    Args:
        what: a noun, the object that needs the memory.
        needed: its bytes.

    Raises:
        HostMemoryFull: the machine has less free memory.
    """
    found = free_host_memory()
    if found is not None and needed > found[0]:
        free, total = map(sized, found)
        raise HostMemoryFull(what=what, needed=sized(needed), free=free, total=total)


def _read_bytes(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdigit() else None


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines() if os.access(path, os.R_OK) else []

"""Resident memory of processes, as Linux reports it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


def resident_bytes(process: int | str = "self") -> int:
    """Memory of a process now, by its id; 0 where it is not known, and after its end."""
    return _of_status(process, "VmRSS")


def peak_bytes(process: int | str = "self") -> int:
    """Most resident memory of a process so far."""
    return _of_status(process, "VmHWM")


def children(process: int) -> list[int]:
    """The ids of the processes that a process has started, and those that they have started."""
    found: list[int] = []
    for file in Path(f"/proc/{process}/task").glob("*/children"):
        for child in _read(file).split():
            found += [int(child), *children(int(child))]
    return found


def _of_status(process: int | str, name: str) -> int:
    values = [
        int(line.split()[1]) for line in _read(Path(f"/proc/{process}/status")).splitlines() if line.startswith(name)
    ]
    return values[0] * 1024 if values else 0


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        # The process has ended, or the system is not Linux.
        return ""


@dataclass(frozen=True)
class Reading:
    """Bytes at a moment, in seconds since the start."""

    moment: float
    size: int


def at(readings: Sequence[Reading], moment: float) -> int:
    """Bytes of the reading that is nearest to a moment."""
    return min(readings, key=lambda reading: abs(reading.moment - moment)).size


def slope(readings: Sequence[Reading]) -> float:
    """Bytes a second over the second half of the time."""
    later = [reading for reading in readings if reading.moment >= readings[-1].moment / 2]
    moments, sizes = [reading.moment for reading in later], [reading.size for reading in later]
    return statistics.linear_regression(moments, sizes).slope if len(later) > 1 else 0.0


def growth(readings: Sequence[Reading]) -> float:
    """By what share memory grew over the second half of the time, by its slope."""
    half = readings[-1].moment / 2
    return slope(readings) * half / at(readings, half)

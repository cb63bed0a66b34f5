"""Return of unused memory to the system: pages of mapped files, and freed memory of the C library."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

_MAPS, _PAGEMAP = Path("/proc/self/maps"), Path("/proc/self/pagemap")
# Flags of an entry of the page map: the page is in memory, and is the file's own. A modified page is not.
_PRESENT, _OF_FILE = np.uint64(1 << 63), np.uint64(1 << 61)


def release_file_pages(tensor: torch.Tensor) -> None:
    """Drop the pages that lie completely in ``tensor``, if it is a view of a privately mapped file.

    A later access reads them from the file again. Modified pages stay, since the file has other contents. Memory that
    is not a file's also stays. Linux only; on other systems nothing happens.
    """
    if sys.platform != "linux" or not os.access(_PAGEMAP, os.R_OK):
        return
    page = mmap.PAGESIZE
    start = tensor.data_ptr()
    first, last = -(-start // page), (start + tensor.nbytes) // page
    if first >= last or not _maps_a_file(first * page, last * page):
        return
    advise = ctypes.CDLL(None).madvise
    for begin, end in _unwritten(first, last):
        # Advice only: pages that are locked in memory stay.
        advise(ctypes.c_void_p(begin * page), ctypes.c_size_t((end - begin) * page), mmap.MADV_DONTNEED)


def trim_heap() -> None:
    """Return freed memory to the system. glibc keeps it while a later allocation is in use. Packs are aligned, and do
    not fit into the gaps that weights leave. With another C library nothing happens."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))


def _maps_a_file(start: int, end: int) -> bool:
    """Whether the addresses from ``start`` to ``end`` are one private mapping of a file."""
    for line in _MAPS.read_text().splitlines():
        addresses, permissions, _, _, inode = line.split()[:5]
        low, high = (int(address, 16) for address in addresses.split("-"))
        if low <= start and end <= high:
            return permissions.endswith("p") and inode != "0"
    return False


def _unwritten(first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield runs of pages (begin, end) from ``first`` to ``last`` that are in memory and not modified."""
    with _PAGEMAP.open("rb") as file:
        file.seek(first * 8)
        entries = np.frombuffer(file.read((last - first) * 8), dtype=np.uint64)
    flags = _PRESENT | _OF_FILE
    bounds = np.diff(((entries & flags) == flags).astype(np.int8), prepend=0, append=0).nonzero()[0]
    for begin, end in bounds.reshape(-1, 2).tolist():
        yield first + begin, first + end

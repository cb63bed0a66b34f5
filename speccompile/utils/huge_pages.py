"""Moves what every step reads to huge pages: with 4 KiB pages a core waits for address translation between them.

Linux keeps ordinary allocations in small pages where ``transparent_hugepage/enabled`` is ``madvise``, the default of
several distributions.
"""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# Of Linux 6.1 and later: include/uapi/asm-generic/mman-common.h.
_MADV_COLLAPSE = 25


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Move the memory of ``tensors`` to huge pages, those that they fill; the rest stays as it is.

    Values and addresses stay. Nothing happens where the system has no huge pages, forbids them (``never``), has none
    free, or is Linux before 6.1.

    Returns:
        Bytes in huge pages.
    """
    size = _page_size()
    if size is None:
        return 0
    advise = ctypes.CDLL(None).madvise
    pages = filled_pages(((tensor.data_ptr(), tensor.nbytes) for tensor in tensors), size)
    return sum(
        size
        for page in pages
        if advise(ctypes.c_void_p(page * size), ctypes.c_size_t(size), ctypes.c_int(_MADV_COLLAPSE)) == 0
    )


def filled_pages(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[int]:
    """Numbers of pages of ``size`` bytes that ``ranges`` (address, bytes) fill but for a sixteenth, ascending: between
    two allocations lie a few bytes that belong to neither."""
    filled: Counter[int] = Counter()
    for start, count in set(ranges):
        end = start + count
        for page in range(start // size, -(-end // size)):
            filled[page] += min(end, (page + 1) * size) - max(start, page * size)
    return (page for page, count in sorted(filled.items()) if count * 16 >= size * 15)


def _page_size() -> int | None:
    """Bytes of a huge page; None where there are none."""
    enabled, size = _SETTINGS / "enabled", _SETTINGS / "hpage_pmd_size"
    if sys.platform != "linux" or not size.exists() or "[never]" in enabled.read_text():
        return None
    return int(size.read_text())

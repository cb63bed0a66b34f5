"""Moves what every step reads to huge pages: with 4 KiB pages a core waits for address translation between them.

Linux keeps ordinary allocations in small pages where ``transparent_hugepage/enabled`` is ``madvise``, the default of
several distributions.
"""

from __future__ import annotations

import ctypes
import errno
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
# Of Linux 6.1 and later: include/uapi/asm-generic/mman-common.h.
_MADV_COLLAPSE = 25
# In a row. Each may have tried to free memory, which takes milliseconds where it is scarce.
_MOST_FAILURES = 4


def use_huge_pages(tensors: Iterable[torch.Tensor]) -> int:
    """Move the memory of ``tensors`` to huge pages, those that they fill; the rest stays as it is.

    Values and addresses stay. Nothing happens where the system has no huge pages, forbids them (``never``), has none
    free, or is Linux before 6.1.

    Args:
        tensors: no two of them overlap, unless they are the same memory.

    Returns:
        Bytes in huge pages.
    """
    size = huge_page_size()
    if size is None:
        return 0
    advise = ctypes.CDLL(None, use_errno=True).madvise
    moved = failures = 0
    for page in filled_pages(((tensor.data_ptr(), tensor.nbytes) for tensor in tensors), size):
        if advise(ctypes.c_void_p(page * size), ctypes.c_size_t(size), ctypes.c_int(_MADV_COLLAPSE)) == 0:
            moved, failures = moved + size, 0
        else:
            # Beside the memory of one allocation may be a gap that belongs to none: ENOMEM too.
            failures += 1
            if ctypes.get_errno() == errno.EINVAL or failures == _MOST_FAILURES:
                break
    return moved


def filled_pages(ranges: Iterable[tuple[int, int]], size: int) -> Iterator[int]:
    """Numbers of pages of ``size`` bytes that ``ranges`` (address, bytes) fill but for a sixteenth, ascending: between
    two allocations lie a few bytes that belong to neither."""
    filled: Counter[int] = Counter()
    for start, count in set(ranges):
        end = start + count
        for page in range(start // size, -(-end // size)):
            filled[page] += min(end, (page + 1) * size) - max(start, page * size)
    return (page for page, count in sorted(filled.items()) if count * 16 >= size * 15)


def huge_page_size() -> int | None:
    """Bytes of a huge page; None where a process gets none."""
    if sys.platform != "linux":
        return None
    try:
        enabled, size = ((_SETTINGS / name).read_text() for name in ("enabled", "hpage_pmd_size"))
    except OSError:
        # A kernel without them, or a sandbox without /sys.
        return None
    return None if "[never]" in enabled else int(size)

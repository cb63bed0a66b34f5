"""Memory of the host that was freed, and that the C library keeps for later."""

from __future__ import annotations

import ctypes
import sys


def return_freed_memory() -> None:
    """Give it back to the system.

    glibc keeps freed blocks of up to 32 MiB, and packed weights and compiled steps lie in such ones. Other C libraries
    have no ``malloc_trim``.
    """
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)

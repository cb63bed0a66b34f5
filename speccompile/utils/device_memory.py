"""Free memory of a GPU, and errors with numbers if it is not enough."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping

import torch

from speccompile.errors import DeviceMemoryFull, error_line

_TRIED = re.compile(r"Tried to allocate ([\d.]+ \w+)")


def free_memory(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes of a GPU that torch can still allocate, and all its bytes; None if the device is not a GPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    # torch keeps freed memory for later allocations.
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + kept, total


def check_memory(device: torch.device, what: str, parts: Mapping[str, int], *, advice: str, loaded: int = 0) -> None:
    """Check before an allocation that a GPU has enough memory.

    Args:
        what: a noun, the object that needs the memory.
        parts: bytes by name.
        advice: a clause, how to need less memory.
        loaded: bytes of weights that are already on the device.

    Raises:
        DeviceMemoryFull: the GPU has less memory.
    """
    found = free_memory(device)
    needed = sum(parts.values())
    if found is None or needed <= found[0]:
        return
    listed = ", ".join(f"{name} {sized(nbytes)}" for name, nbytes in parts.items())
    text = f"{sized(needed)} are needed" + f" ({listed})" * (len(parts) > 1)
    if loaded:
        text += f" in addition to {sized(loaded)} of loaded weights"
    raise _full(device, what, text, advice, found)


@contextlib.contextmanager
def memory_errors(device: torch.device, what: str, *, advice: str, known: Mapping[str, int]) -> Iterator[None]:
    """Convert torch's error for a full GPU to :class:`DeviceMemoryFull`.

    Args:
        known: bytes by name that ``what`` is known to need.
    """
    try:
        yield
    except torch.OutOfMemoryError as error:
        tried = _TRIED.search(str(error))
        text = f"an allocation of {tried[1]} failed" if tried else error_line(error)
        listed = [f"{name} {sized(nbytes)}" for name, nbytes in known.items()]
        found = free_memory(device)
        if found is not None:
            listed.append(f"in all {sized(torch.cuda.memory_allocated(device))} are allocated")
        raise _full(device, what, "; ".join([*listed, text]), advice, found or (0, 0)) from error


def sized(nbytes: int) -> str:
    """Format bytes as ``15.0 GiB``, or in MiB below one GiB."""
    return f"{nbytes / 2**30:.1f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"


def _full(device: torch.device, what: str, needed: str, advice: str, found: tuple[int, int]) -> DeviceMemoryFull:
    free, total = map(sized, found)
    return DeviceMemoryFull(device=str(device), what=what, needed=needed, free=free, total=total, advice=advice)

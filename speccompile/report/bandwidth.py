"""Measured memory read bandwidth of this machine."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from speccompile.utils.devices import traits_of

#: Bytes to read: more than caches hold.
NBYTES = 2**28
_REPEATS = 4


def read_bandwidth(device: torch.device, nbytes: int = NBYTES) -> float:
    """Bytes per second of reading float32 numbers: the faster of a sum and a matrix-vector product."""
    numbers = torch.ones(nbytes // 4, device=device)
    matrix, vector = numbers.view(-1, 1024), torch.ones(1024, device=device)
    reads: list[Callable[[], torch.Tensor]] = [numbers.sum, lambda: matrix @ vector]
    fastest = min(_seconds(read, device) for read in reads for _ in range(_REPEATS))
    return nbytes / fastest


def _seconds(read: Callable[[], torch.Tensor], device: torch.device) -> float:
    started = time.perf_counter()
    read()
    if traits_of(device).asynchronous:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started

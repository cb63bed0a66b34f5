"""The CUDA stream that all of an engine's work goes to."""

from __future__ import annotations

import contextlib

import torch


def engine_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The device's default stream, also where the calling thread has selected another stream or device.

    Threads take turns on the host, which orders nothing on the device: a step may write what the one before it still
    reads, unless both are on one stream.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))

"""The CUDA stream of an engine's work."""

from __future__ import annotations

import contextlib

import torch


def engine_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Select the device's default stream, also if the calling thread has selected another stream or device.

    The engine's lock orders the threads on the host, but not their work on the device. On two streams, a step could
    overwrite data that the step before it still reads.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.default_stream(device))

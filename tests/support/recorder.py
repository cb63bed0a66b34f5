"""A streamer that keeps all it receives."""

from __future__ import annotations

from typing import Any

import torch


class Recorder:
    """A streamer that keeps what it is given."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.received.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.received.append("end")

"""Seconds of each part of a build."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Seconds:
    """Total seconds by name of the work."""

    def __init__(self) -> None:
        self.by_name: dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to the part ``name``."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self.by_name[name] = self.by_name.get(name, 0.0) + time.perf_counter() - started

"""Processors that a test registers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

from speccompile.sampling import Processor, pipeline


@contextlib.contextmanager
def processor_registry(known: dict[str, list[Processor]]) -> Iterator[None]:
    """Register processors beside ``known`` ones, and forget them at the end."""
    with patch.dict(pipeline.REGISTERED, known, clear=True), patch.dict(pipeline.OPTIONS):
        yield

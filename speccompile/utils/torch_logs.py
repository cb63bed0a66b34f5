"""Control of torch's log lines."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def without_log(name: str) -> Iterator[None]:
    """Disable the log ``name``. torch logs errors before it raises them; the error is enough here."""
    logger = logging.getLogger(name)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before

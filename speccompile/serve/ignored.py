"""Fields of requests that clients send by default and that have no effect here. None of them changes an answer."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("speccompile.serve")


@functools.cache
def log_ignored(field: str, reason: str) -> None:
    """Log once that ``field`` has no effect. Both must be from a fixed list, since every pair is kept."""
    log.warning("%s is ignored, since %s", field, reason)

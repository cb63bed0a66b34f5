"""The file of what the drafter of a server learns from requests (``speccompile serve --memory``)."""

from __future__ import annotations

import logging
from pathlib import Path

from speccompile import Speculator
from speccompile.errors import InvalidOption, error_line

log = logging.getLogger("speccompile.serve")


def open_memory(spec: Speculator, path: Path) -> None:
    """Load the memory. If the file does not exist, write one: a path that cannot be written is then an error before
    requests are served.

    Raises:
        InvalidOption: the file cannot be read or written.
        NoMemory, CorruptMemory, ForeignMemory: it is not one of this drafter.
    """
    try:
        (spec.load_memory if path.exists() else spec.save_memory)(path)
    except OSError as error:
        reason = f"it cannot be opened: {error_line(error)}"
        raise InvalidOption(where="serve", name="memory", value=str(path), reason=reason) from error


def close_memory(spec: Speculator, path: Path) -> None:
    """Write the memory. A disk that is full by now is logged: the server ends in any case."""
    try:
        spec.save_memory(path)
    except OSError as error:
        log.error("what the drafter has learned cannot be written to %s: %s", path, error_line(error))

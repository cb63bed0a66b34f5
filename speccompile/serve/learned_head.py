"""The folder of a draft head that learns from requests (``speccompile serve --learn``)."""

from __future__ import annotations

import logging
from pathlib import Path

from speccompile import Speculator
from speccompile.errors import InvalidOption, error_line

log = logging.getLogger("speccompile.serve")


def has_head(folder: Path) -> bool:
    """Whether a head was written to the folder."""
    return (folder / "config.json").exists()


def open_head(spec: Speculator, folder: Path) -> None:
    """Write the head, unless the folder has one: a path that cannot be written is then an error before requests are
    served.

    Raises:
        InvalidOption: the head does not learn, or the folder cannot be written.
    """
    try:
        spec.learner  # noqa: B018  raises InvalidOption if no head learns
        if not has_head(folder):
            spec.save_head(folder)
    except OSError as error:
        reason = f"it cannot be written: {error_line(error)}"
        raise InvalidOption(where="serve", name="learn", value=str(folder), reason=reason) from error


def close_head(spec: Speculator, folder: Path) -> None:
    """Write the head. A disk that is full by now is logged: the server ends in any case."""
    try:
        spec.save_head(folder)
    except OSError as error:
        log.error("the head that has learned cannot be written to %s: %s", folder, error_line(error))

"""The folder of a draft head that learns from requests (``speccompile serve --learn``)."""

from __future__ import annotations

import logging
from pathlib import Path

from speccompile import Speculator
from speccompile.errors import InvalidOption, error_line
from speccompile.modes.network.config_keys import read_keys
from speccompile.modes.network.made_for import KEY

log = logging.getLogger("speccompile.serve")


def has_head(folder: Path) -> bool:
    """Whether an earlier server, or a training, has written a head to the folder.

    Raises:
        InvalidOption: it holds something else, which would be overwritten.
    """
    path = folder / "config.json"
    if not path.exists():
        return False
    if KEY not in read_keys(path, str(folder)):
        reason = (
            "it holds a config.json that neither --learn nor train-head has written; name another folder, and give the "
            "head with --option draft="
        )
        raise InvalidOption(where="serve", name="learn", value=str(folder), reason=reason)
    return True


def open_head(spec: Speculator, folder: Path) -> None:
    """Write the head: a path that cannot be written is then an error before requests are served.

    Raises:
        InvalidOption: the head does not learn, or the folder cannot be written, or holds something else.
    """
    has_head(folder)
    try:
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

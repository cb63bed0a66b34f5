"""Files that are complete or absent, also after the process is killed."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, data: bytes) -> None:
    """Write ``data`` under another name, flush it to the disk, and rename it to ``path``.

    A killed process leaves at most ``partial_path(path)``.

    Raises:
        OSError: the disk is full or cannot be written; ``path`` does not change.
    """
    partial = partial_path(path)
    try:
        with partial.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        # On a full disk, other files need the space.
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)
    _sync_folder(path.parent)


def partial_path(path: Path) -> Path:
    """The name of ``path`` while it is being written."""
    return path.with_name(f".{path.name}.partial")


def _sync_folder(folder: Path) -> None:
    """Flush the folder's file names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)

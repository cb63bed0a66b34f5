"""Digest of this package's code, as a part of keys. Results of other code are not read."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".cu")


@functools.cache
def sources(*packages: str) -> str:
    """Return a digest of the code of ``packages`` (folders of this package), or of the whole package."""
    whole = hashlib.sha256()
    folders = [PACKAGE / package for package in packages] or [PACKAGE]
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES):
        whole.update(f"{path.relative_to(PACKAGE)}\n".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()

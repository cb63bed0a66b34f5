"""The code of this package as a part of keys: what was made by other code is not read."""

from __future__ import annotations

import functools
import hashlib
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SUFFIXES = (".py", ".cpp", ".h", ".cu")


@functools.cache
def sources(*rooms: str) -> str:
    """Digest of the code of ``rooms`` (folders of this package), or of the whole package."""
    whole = hashlib.sha256()
    folders = [PACKAGE / room for room in rooms] or [PACKAGE]
    for path in sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in SUFFIXES):
        whole.update(f"{path.relative_to(PACKAGE)}\n".encode())
        whole.update(path.read_bytes())
    return whole.hexdigest()

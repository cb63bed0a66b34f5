"""The cache folder of this package."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """Return ``$SPECCOMPILE_CACHE``, else ``speccompile`` in ``$XDG_CACHE_HOME`` or ``~/.cache``."""
    if own := os.environ.get("SPECCOMPILE_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared) / "speccompile"
    return Path.home() / ".cache" / "speccompile"

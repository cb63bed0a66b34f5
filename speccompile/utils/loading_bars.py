"""Progress bars of transformers, switched off for short work."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from transformers.utils import logging as hf_logging


@contextlib.contextmanager
def without_loading_bars() -> Iterator[None]:
    """Switch the bars of transformers off in this context: loading from a local disk needs seconds at most."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()

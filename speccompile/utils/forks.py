"""Callbacks for forks of the process. On systems without ``fork`` they are never called."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable


def before_fork(function: Callable[[], None]) -> None:
    """Call ``function`` in the thread that is about to fork."""
    if sys.platform != "win32":
        os.register_at_fork(before=function)


def in_child(function: Callable[[], None]) -> None:
    """Call ``function`` in each forked child. A child only has the thread that forked."""
    if sys.platform != "win32":
        os.register_at_fork(after_in_child=function)

"""Warnings at the line of the caller's own code."""

from __future__ import annotations

import sys
import warnings

PACKAGE = __name__.partition(".")[0]
#: Context managers stand between frames of this package.
PASSED_OVER = (PACKAGE, "contextlib")


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line that called into this package, however deep this call is."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, category, stacklevel=level)

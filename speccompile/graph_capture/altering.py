"""Hooks and settings that this package sets on a model temporarily."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from torch import nn

_altered: list[nn.Module] = []


@contextlib.contextmanager
def altering(model: nn.Module) -> Iterator[None]:
    """Mark ``model`` in this context: the package sets hooks or settings, which guards of other threads ignore."""
    _altered.append(model)
    try:
        yield
    finally:
        _altered.remove(model)


def is_altered(model: nn.Module) -> bool:
    """Whether some thread is in :func:`altering` for ``model``."""
    return any(module is model for module in _altered)

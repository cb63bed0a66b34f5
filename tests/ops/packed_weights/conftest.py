"""Packed weights in the printed step, which needs no compiled bodies."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def in_every_test(native: None) -> None:
    """See :func:`native`."""

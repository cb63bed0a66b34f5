"""Warnings at the line of the caller's own code."""

from __future__ import annotations

import types
from pathlib import Path

import pytest

from speccompile.errors import Degraded
from speccompile.utils.warn import warn_caller

INSIDE = """
import contextlib
from speccompile.utils.warn import warn_caller

@contextlib.contextmanager
def manager():
    warn_caller("lost", Warning)
    yield

def entered():
    with manager():
        pass

def called():
    entered()
"""


def test_a_warning_names_the_line_that_called_into_the_package() -> None:
    module = types.ModuleType("speccompile.made_up")
    exec(INSIDE, module.__dict__)
    with pytest.warns(Warning, match="lost") as warned:
        module.called()
        module.entered()
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}


def test_one_of_the_callers_own_is_at_its_own_line() -> None:
    with pytest.warns(Degraded) as warned:
        warn_caller("lost", Degraded)
    assert Path(warned[0].filename) == Path(__file__)

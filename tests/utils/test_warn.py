"""Warnings at the line of the caller's own code."""

from __future__ import annotations

import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread

import pytest

from speccompile.errors import Degraded
from speccompile.utils.warn import calling_line, warn_caller

INSIDE = """
import contextlib
from threading import Thread

from speccompile.utils.warn import on_behalf_of, warn_caller

@contextlib.contextmanager
def manager():
    warn_caller("lost", Warning)
    yield

def entered():
    with manager():
        pass

def called():
    entered()

def started(place):
    def work():
        with on_behalf_of(place):
            called()

    thread = Thread(target=work)
    thread.start()
    thread.join()
"""


@pytest.fixture
def module() -> types.ModuleType:
    """A part of the package."""
    made = types.ModuleType("speccompile.made_up")
    exec(compile(INSIDE, "made_up.py", "exec"), made.__dict__)
    return made


def test_a_warning_names_the_line_that_called_into_the_package(module: types.ModuleType) -> None:
    with pytest.warns(Warning, match="lost") as warned:
        module.called()
        module.entered()
    assert {Path(warning.filename) for warning in warned} == {Path(__file__)}


def test_a_command_is_a_caller(module: types.ModuleType) -> None:
    command = types.ModuleType("speccompile.cli.made_up")
    command.__dict__["wrap"] = module.called
    exec(compile("def run(): wrap()", "a_command.py", "exec"), command.__dict__)
    with pytest.warns(Warning, match="lost") as warned:
        command.run()
    assert warned[0].filename == "a_command.py"


def in_a_thread(function: Callable[[], None]) -> None:
    thread = Thread(target=function)
    thread.start()
    thread.join()


def in_a_pool(function: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as pool:
        pool.submit(function).result()


@pytest.mark.parametrize("run", [in_a_thread, in_a_pool])
def test_a_thread_that_runs_the_package_alone_warns_there(
    module: types.ModuleType, run: Callable[[Callable[[], None]], None]
) -> None:
    with pytest.warns(Warning, match="lost") as warned:
        run(module.called)
    assert warned[0].filename == "made_up.py"


def test_a_thread_of_the_package_warns_on_behalf_of_who_started_it(module: types.ModuleType) -> None:
    place = calling_line()
    with pytest.warns(Warning, match="lost") as warned:
        module.started(place)
    assert (warned[0].filename, warned[0].lineno) == (__file__, place.line)


def test_one_of_the_callers_own_is_at_its_own_line() -> None:
    with pytest.warns(Degraded) as warned:
        warn_caller("lost", Degraded)
    assert Path(warned[0].filename) == Path(__file__)

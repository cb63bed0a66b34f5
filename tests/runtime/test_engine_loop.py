"""EngineLoop over a scheduler that a few lines stand in for: who steps, who waits, and what leaves when."""

from __future__ import annotations

import threading

import pytest

from speccompile.errors import Closed, ForkedSpeculator, Rebuilt
from support.engine_parts import request_of
from support.engines import PATIENCE, threads
from support.errors import raises
from support.loop_parts import TurnParts


@pytest.fixture
def parts() -> TurnParts:
    return TurnParts()


def test_a_step_is_taken_by_the_thread_that_wants_it(parts: TurnParts) -> None:
    mine: list[bool] = []
    parts.steps.work = lambda: mine.append(parts.loop.holds_lock)
    parts.loop.step()
    parts.loop.step_or_wait()
    assert mine == [True, True] and not parts.loop.holds_lock


def test_one_thread_at_a_time_has_the_turn(parts: TurnParts) -> None:
    got: list[bool] = []

    def other() -> None:
        with parts.loop.exclusive(blocking=False) as own:
            got.append(own)

    with parts.loop.exclusive(), threads(other):
        pass
    with threads(other):
        pass
    assert got == [False, True]


def test_close_returns_when_serving_threads_have_left(parts: TurnParts) -> None:
    serves, may_leave, closed = threading.Event(), threading.Event(), threading.Event()

    def serve() -> None:
        with parts.loop.serving():
            serves.set()
            may_leave.wait(PATIENCE)

    def close() -> None:
        serves.wait(PATIENCE)
        parts.loop.close()
        closed.set()

    with threads(serve, close):
        assert serves.wait(PATIENCE)
        assert not closed.wait(0.1)
        may_leave.set()
        assert closed.wait(PATIENCE)


def test_a_serving_thread_may_close(parts: TurnParts) -> None:
    with parts.loop.serving():
        parts.loop.close()
    assert parts.loop.closed


def test_a_step_that_raises_gives_the_turn_back(parts: TurnParts) -> None:
    def fail() -> None:
        raise ZeroDivisionError

    parts.steps.work = fail
    with pytest.raises(ZeroDivisionError):
        parts.loop.step()
    with parts.loop.exclusive(blocking=False) as own:
        assert own


def test_it_is_idle_when_nothing_waits_and_runs_and_no_turn_is_on(parts: TurnParts) -> None:
    assert parts.loop.idle
    with parts.loop.exclusive():
        assert not parts.loop.idle
    request = parts.running()
    assert not parts.loop.idle
    parts.slots.release(request)
    parts.loop.enqueue([request_of(parts.arena)])
    assert not parts.loop.idle


# --- a thread that serves ------------------------------------------------------------------------


def test_another_thread_does_not_step_while_one_serves(parts: TurnParts) -> None:
    served, leave = threading.Event(), threading.Event()

    def serve() -> None:
        with parts.loop.serving():
            served.set()
            leave.wait(PATIENCE)

    with threads(serve):
        served.wait(PATIENCE)
        parts.loop.step_or_wait(timeout=0.01)
        assert parts.steps.count == 0
        leave.set()
    parts.loop.step_or_wait()
    assert parts.steps.count == 1


def test_a_thread_that_waits_goes_on_when_the_serving_one_leaves(parts: TurnParts) -> None:
    served, waits = threading.Event(), threading.Event()

    def serve() -> None:
        with parts.loop.serving():
            served.set()
            waits.wait(PATIENCE)

    def done() -> bool:
        waits.set()
        return False

    with threads(serve):
        served.wait(PATIENCE)
        parts.loop.step_or_wait(done)
    assert parts.steps.count == 0


# --- requests that end outside of a step ---------------------------------------------------------


def test_a_request_that_ends_during_a_turn_leaves_when_the_turn_ends(parts: TurnParts) -> None:
    request = parts.running()
    request.end("cancelled")
    with parts.loop.exclusive():
        parts.loop.ended(request)
        assert not request.closed
    assert request.closed and parts.slots.free == 2


def test_an_abandoned_request_makes_room_for_the_next_one(parts: TurnParts) -> None:
    parts.running(), parts.running()
    abandoned, next_one = request_of(parts.arena), request_of(parts.arena)
    parts.loop.enqueue([abandoned])
    parts.loop.abandoned(abandoned)
    parts.loop.enqueue([next_one])
    assert parts.waiting.requests == [next_one]


# --- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Closed, Rebuilt])
def test_a_closed_engine_says_why(parts: TurnParts, kind: type[Closed]) -> None:
    parts.loop.closed_error = kind
    parts.loop.close()
    with raises(kind):
        parts.loop.step()
    with raises(kind):
        parts.loop.enqueue([request_of(parts.arena)])
    assert len(parts.waiting) == 0


def test_a_forked_child_steps_for_itself(parts: TurnParts) -> None:
    with parts.loop.serving():
        parts.loop.after_fork()
        with threads(parts.loop.step_or_wait):
            pass
    assert parts.steps.count == 1


def test_a_forked_child_of_one_that_saves_does_not_step() -> None:
    parts = TurnParts(saves=True)
    parts.loop.after_fork()
    assert parts.loop.forked
    with raises(ForkedSpeculator):
        parts.loop.step()
    assert parts.steps.count == 0

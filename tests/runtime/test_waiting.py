"""The waiting queue: bounded, by priority, then first come, first served."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import StoppingCriteriaList

from speccompile.errors import QueueFull
from speccompile.runtime.listener import Listener
from speccompile.runtime.params import Params
from speccompile.runtime.request import Request
from speccompile.runtime.score_records import ExtraOutputs, Records
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.waiting import WaitingQueue
from support.errors import raises


class NoScheduler:
    """A driver: the queue asks nothing of it."""

    def ended(self, request: Request) -> None:
        raise AssertionError

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        raise AssertionError

    async def wait_async(self, request: Request, seen: int) -> None:
        raise AssertionError


def request(priority: int = 0) -> Request:
    listener = Listener(torch.tensor([[1]]), 1, None, StoppingCriteriaList())
    return Request(
        NoScheduler(), [1], Params(1, (), priority=priority), listener, RequestStats(0), Records(ExtraOutputs(), {})
    )


def emptied(queue: WaitingQueue) -> list[Request]:
    taken = []
    while (request := queue.pop()) is not None:
        taken.append(request)
    return taken


@given(priorities=st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(-2, 2), max_size=20))
def test_by_priority_then_first_come_first_served(priorities: list[int]) -> None:
    queue = WaitingQueue(len(priorities))
    requests = [request(priority) for priority in priorities]
    for each in requests:
        queue.push([each], 0)
    # sorted is stable: those of one priority stay in the order in which they came.
    assert emptied(queue) == sorted(requests, key=lambda each: -each.params.priority)


def test_those_pushed_together_keep_their_order() -> None:
    queue = WaitingQueue(9)
    batch, later = [request() for _ in range(4)], request()
    queue.push(batch, 0)
    queue.push([later], 0)
    assert emptied(queue) == [*batch, later]


def test_who_comes_later_with_the_same_priority_waits_behind_those_left() -> None:
    """Numbers are never given out twice: also not when the queue was empty in between."""
    queue = WaitingQueue(9)
    queue.push([request(), request()], 0)
    first = queue.pop()
    left, late = emptied(queue)[0], request()
    assert first is not left
    queue.push([left], 0)
    queue.push([late], 0)
    assert emptied(queue) == [left, late]


def test_an_empty_queue_gives_nothing() -> None:
    queue = WaitingQueue(3)
    assert queue.pop() is None and queue.drain() == [] and len(queue) == 0


@pytest.mark.parametrize(("limit", "free"), [(0, 0), (0, 2), (1, 0), (2, 3)])
def test_the_limit_does_not_count_those_who_will_have_a_free_slot(limit: int, free: int) -> None:
    queue = WaitingQueue(limit)
    for _ in range(limit + free):
        queue.push([request()], free)
    with raises(QueueFull, count=1, waiting=limit + free, limit=limit):
        queue.push([request()], free)
    assert len(queue) == limit + free


def test_all_of_a_batch_or_none() -> None:
    queue = WaitingQueue(3)
    queue.push([request()], 0)
    with raises(QueueFull, count=3, waiting=1):
        queue.push([request() for _ in range(3)], 0)
    assert len(queue) == 1
    queue.push([request() for _ in range(2)], 0)
    assert len(queue) == 3


def test_nobody_may_always_come() -> None:
    queue = WaitingQueue(0)
    queue.push([], 0)
    assert len(queue) == 0


def test_whoever_is_taken_out_makes_room() -> None:
    queue = WaitingQueue(1)
    queue.push([request()], 0)
    queue.pop()
    queue.push([request()], 0)
    assert len(queue) == 1


def test_removing_takes_that_one_alone() -> None:
    queue = WaitingQueue(9)
    requests = [request() for _ in range(5)]
    queue.push(requests, 0)
    queue.remove(requests[2])
    # No longer there, or never: nothing to do.
    queue.remove(requests[2])
    queue.remove(request())
    assert len(queue) == 4
    assert emptied(queue) == [requests[0], requests[1], requests[3], requests[4]]


def test_draining_takes_all_in_order() -> None:
    queue = WaitingQueue(9)
    low, high = request(-1), request(1)
    queue.push([low, high], 0)
    assert queue.drain() == [high, low]
    assert len(queue) == 0


def test_threads_that_push_pop_and_remove_lose_and_double_nothing() -> None:
    """Each thread's requests come out once: popped by another thread, or removed by their owner."""
    queue, each = WaitingQueue(10**6), 300
    popped: list[Request] = []
    left: list[Request] = []
    pushing = threading.Semaphore(0)

    def push(number: int) -> None:
        for index in range(each):
            mine = request(priority=index % 3)
            queue.push([mine], 0)
            if index % 5 == number:
                queue.remove(mine)
                left.append(mine)
        pushing.release()

    def pop(stop: threading.Event) -> None:
        while not stop.is_set():
            taken = queue.pop()
            if taken is None:
                time.sleep(0.0005)
            else:
                popped.append(taken)

    stop = threading.Event()
    pushers = [threading.Thread(target=push, args=(number,), daemon=True) for number in range(4)]
    poppers = [threading.Thread(target=pop, args=(stop,), daemon=True) for _ in range(2)]
    for thread in [*pushers, *poppers]:
        thread.start()
    for thread in pushers:
        thread.join(30)
        assert not thread.is_alive()
    stop.set()
    for thread in poppers:
        thread.join(30)
        assert not thread.is_alive()
    popped.extend(emptied(queue))
    assert len(popped) == len(set(map(id, popped)))
    # Who was popped before its owner removed it counts as popped.
    assert len({*map(id, popped), *map(id, left)}) == 4 * each

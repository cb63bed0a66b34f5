"""The waiting queue: bounded, as a whole and for each client, and in order."""

from __future__ import annotations

import threading
import time

import pytest
import torch
from transformers import StoppingCriteriaList

from speccompile.errors import ClientQueueFull, QueueFull
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


def request(*client: str) -> Request:
    listener = Listener(torch.tensor([[1]]), 1, None, StoppingCriteriaList())
    params = Params(1, (), client=client or Params.client)
    return Request(NoScheduler(), [1], params, listener, RequestStats(0), Records(ExtraOutputs(), {}))


def test_those_pushed_together_keep_their_order() -> None:
    queue = WaitingQueue(9)
    batch, later = [request() for _ in range(4)], request()
    queue.push(batch, 0)
    queue.push([later], 0)
    assert queue.drain() == [*batch, later]


def test_an_empty_queue_gives_nothing() -> None:
    queue = WaitingQueue(3)
    assert queue.requests == [] and queue.drain() == [] and len(queue) == 0


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


def test_one_client_has_at_most_its_share_of_the_queue() -> None:
    queue = WaitingQueue(4)
    queue.client_limit = 2
    for name in ("chat 1", "chat 2", "chat 3"):
        queue.push([request("10.0.0.7", name)], 1)
    with raises(ClientQueueFull, client="10.0.0.7", count=1, waiting=3, limit=2):
        queue.push([request("10.0.0.7", "chat 4")], 1)
    queue.push([request("10.0.0.8")], 1)
    with raises(QueueFull, count=2, waiting=4, limit=4):
        queue.push([request(), request()], 1)
    queue.push([request()], 1)


def test_nobody_may_always_come() -> None:
    queue = WaitingQueue(0)
    queue.push([], 0)
    assert len(queue) == 0


def test_whoever_is_taken_out_makes_room() -> None:
    queue = WaitingQueue(1)
    first = request()
    queue.push([first], 0)
    assert queue.remove(first)
    queue.push([request()], 0)
    assert len(queue) == 1


def test_removing_takes_that_one_alone() -> None:
    queue = WaitingQueue(9)
    requests = [request() for _ in range(5)]
    queue.push(requests, 0)
    assert queue.remove(requests[2])
    # No longer there, or never: nothing to do.
    assert not queue.remove(requests[2])
    assert not queue.remove(request())
    assert len(queue) == 4
    assert queue.drain() == [requests[0], requests[1], requests[3], requests[4]]


def test_draining_takes_all_in_order() -> None:
    queue = WaitingQueue(9)
    first, second = request(), request()
    queue.push([first, second], 0)
    assert queue.drain() == [first, second]
    assert len(queue) == 0


def test_threads_that_push_and_remove_lose_and_double_nothing() -> None:
    """Each thread's requests come out once: taken by another thread, or removed by their owner."""
    queue, each = WaitingQueue(10**6), 300
    popped: list[Request] = []
    left: list[Request] = []
    pushing = threading.Semaphore(0)

    def push(number: int) -> None:
        for index in range(each):
            mine = request()
            queue.push([mine], 0)
            if index % 5 == number and queue.remove(mine):
                left.append(mine)
        pushing.release()

    def pop(stop: threading.Event) -> None:
        while not stop.is_set():
            waiting = queue.requests
            if not waiting:
                time.sleep(0.0005)
            popped.extend(taken for taken in waiting[:1] if queue.remove(taken))

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
    popped.extend(queue.drain())
    assert len(popped) == len(set(map(id, popped)))
    assert len(popped) + len(left) == len({*map(id, popped), *map(id, left)}) == 4 * each

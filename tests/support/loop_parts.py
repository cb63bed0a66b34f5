"""EngineLoop over a scheduler that a few lines stand in for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import torch

from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.request import Request
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.waiting import WaitingQueue
from support.engine_parts import Parts, request_of


class Steps:
    """Stands in for the scheduler: counts steps, and does ``work`` in each."""

    def __init__(self) -> None:
        self.flights: deque[object] = deque()
        self.count = 0
        self.work: Callable[[], object] = lambda: None

    def run_step(self) -> list[Request]:
        self.count += 1
        self.work()
        return []


class TurnParts(Parts):
    """EngineLoop over two real slots and a queue of one."""

    def __init__(self, *, saves: bool = False) -> None:
        super().__init__()
        self.steps, self.waiting = Steps(), WaitingQueue(1)
        steps = cast(Scheduler, self.steps)
        self.loop = EngineLoop(steps, self.waiting, self.slots, self.retirement, torch.device("cpu"), saves=saves)

    def running(self) -> Request:
        request = request_of(self.arena)
        self.slots.take(request)
        return request

"""EngineLoop over a scheduler that a few lines stand in for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import cast

import torch

from speccompile.runtime.batch import Batch
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.waiting import WaitingQueue
from support.engine_parts import request_of, small_arena


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


class TurnParts:
    """EngineLoop over two real slots and a queue of one."""

    def __init__(self, *, saves: bool = False) -> None:
        self.arena, self.steps, self.waiting = small_arena(), Steps(), WaitingQueue(1)
        self.slots = Slots(self.arena, lambda: 0, reuse=False, clear=False)
        self.retirement = Retirement(Batch(self.arena), self.slots, Stats(3), None)
        scheduler = cast(Scheduler, self.steps)
        device = torch.device("cpu")
        self.loop = EngineLoop(scheduler, self.waiting, self.slots, self.retirement, device, saves=saves)

    def running(self) -> Request:
        request = request_of(self.arena)
        self.slots.take(request)
        return request

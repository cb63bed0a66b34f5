"""Submission of requests: their executables are built, and they are created and queued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import StoppingCriteriaList

from speccompile.graph.keys import Kind
from speccompile.hidden_states.records import RecordSpec
from speccompile.multimodal.inputs import Features
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.listener import Streamer
from speccompile.runtime.params import Params
from speccompile.runtime.request import Driver, Request
from speccompile.runtime.request_factory import RequestFactory
from speccompile.runtime.request_options import SubmitOptions
from speccompile.runtime.slots import Slots
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.waiting import WaitingQueue


@dataclass(frozen=True)
class Capacity:
    """The load of the engine, and its capacity for further requests.

    Args:
        slots: number of all slots; ``free_slots`` of them have no owner.
        waiting: requests without a slot; ``free_waiting`` more would be accepted.
    """

    slots: int
    free_slots: int
    waiting: int
    free_waiting: int

    @property
    def room(self) -> int:
        """The name of ``free_waiting`` in version 0.1."""
        return self.free_waiting


class RequestSubmitter:
    """Creates requests in any thread, after the executables that they run are built, and queues them.

    Args:
        ranks: ranks of a sharded model; one of them accepts requests.
        max_batch: the number of slots.
        captured: see :class:`~speccompile.runtime.options.StepTraits`.
    """

    def __init__(
        self,
        factory: RequestFactory,
        table: TierTable,
        loop: EngineLoop,
        slots: Slots,
        waiting: WaitingQueue,
        ranks: Ranks | None,
        *,
        max_batch: int,
        captured: bool,
    ) -> None:
        self._factory = factory
        self._table = table
        self._loop = loop
        self._slots = slots
        self._waiting = waiting
        self._ranks = ranks
        self._max_batch = max_batch
        self._captured = captured

    def submit(
        self,
        driver: Driver,
        ids: Sequence[int] | torch.Tensor,
        options: SubmitOptions,
        inputs: Mapping[str, Any] | Features | None = None,
    ) -> Request:
        """Create a request from the arguments of :meth:`~speccompile.runtime.engine.Engine.submit`, and queue it.

        Args:
            driver: steps for the request.

        Raises:
            QueueFull, Closed, UserError: the errors of that method.
        """
        self._check_accepts()
        return self.enqueue(self._factory.from_options(driver, self._prepare_missing, ids, options, inputs))

    def embed(self, ids: Sequence[int] | torch.Tensor, inputs: Mapping[str, Any]) -> Features | None:
        """Embed images for :meth:`~speccompile.runtime.engine.Engine.embed`."""
        return self._factory.embed(ids, inputs)

    def create(
        self,
        driver: Driver,
        prompt: list[int],
        params: Params,
        shown: torch.Tensor,
        streamer: Streamer | None,
        criteria: StoppingCriteriaList,
    ) -> Request:
        """Create a request from checked ``params``, without queueing it. Arguments are those of
        :meth:`RequestFactory.make`."""
        self._check_accepts()
        return self._factory.make(driver, self._prepare_missing, prompt, params, shown, streamer, criteria)

    def enqueue(self, request: Request) -> Request:
        """Queue ``request``, and return it.

        Raises:
            QueueFull, Closed: it is not queued, and its reserved record is free again.
        """
        try:
            self._loop.enqueue([request])
        except KeyboardInterrupt:
            # The request is already queued, but the caller never receives it.
            request.cancel()
            raise
        except BaseException:
            self._factory.cancel_record(request.params)
            raise
        return request

    def reserve_record(self, where: str, record: bool | str) -> RecordSpec | None:
        """Call :meth:`RequestFactory.reserve_record`."""
        return self._factory.reserve_record(where, record)

    def prepare(self, kind: Kind, *, watched: bool = False) -> None:
        """Build executables for :meth:`~speccompile.runtime.engine.Engine.prepare`."""
        with self._loop.while_building(exclusive=self._captured):
            self._table.prepare(kind, watched=watched)

    def capacity(self) -> Capacity:
        """Return the current capacity. Another thread may change it at once."""
        self._loop.end_abandoned()
        self._loop.clean_up()
        free, waiting = self._slots.free, len(self._waiting)
        return Capacity(self._max_batch, free, waiting, max(0, self._waiting.limit + free - waiting))

    def _check_accepts(self) -> None:
        self._loop.check_process()
        if self._ranks is not None:
            self._ranks.check_leads()

    def _prepare_missing(self, kind: Kind, watched: bool) -> None:
        if not self._table.prepared(kind, watched=watched):
            self.prepare(kind, watched=watched)

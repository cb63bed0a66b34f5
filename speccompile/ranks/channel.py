"""Communication of ranks beside the collectives of their steps: one message for each run, and comparisons."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist

from speccompile.errors import RankLost
from speccompile.ops.collective import named_errors, new_group
from speccompile.utils.torch_private import all_gather_into

#: Bytes of the first part of a message. In most steps the message fits into it.
FIRST_PART = 1024
#: Seconds that another rank may spend on a build, or on the model's own forwards.
CALL_TIMEOUT = 3600.0

#: A method of the arena that the host called since the last message: its name and its arguments.
Change = tuple[str, tuple[Any, ...]]


@dataclass(frozen=True)
class RankMessage:
    """The next action of the followers.

    Args:
        action: ``run`` the program ``name``; ``call`` the function ``name`` with ``argument``; ``wait`` for the next
            message (the leader is alive); ``end``.
        changes: calls of the arena's methods, to be repeated before the action.
        compare: whether all ranks compare their state afterwards.
    """

    action: Literal["run", "call", "wait", "end"]
    name: str = ""
    argument: Any = None
    changes: tuple[Change, ...] = ()
    compare: bool = False


class Channel:
    """Messages of rank 0 and small exchanges, over the host's network (gloo) on every device.

    Args:
        ranks: the global ranks of the group.
        timeout: seconds after which a rank that does not answer is lost.
    """

    def __init__(self, ranks: list[int], timeout: float) -> None:
        self._group = new_group(ranks, timeout, "gloo")
        # A build needs longer than a step. A process that dies in it is still detected at once.
        self._calls = new_group(ranks, timeout, "gloo", longest=CALL_TIMEOUT)
        self._first = ranks[0]
        self.ranks = len(ranks)
        self.rank = ranks.index(dist.get_rank())

    def send(self, message: RankMessage) -> None:
        """Send a message from rank 0 to all others.

        Raises:
            RankLost: another rank has ended.
        """
        data = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
        packed = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
        first = torch.zeros(FIRST_PART, dtype=torch.uint8)
        first[: len(packed)] = packed[:FIRST_PART]
        self._broadcast(first)
        if len(packed) > FIRST_PART:
            self._broadcast(packed[FIRST_PART:].clone())

    def receive(self) -> RankMessage:
        """Return the next message of rank 0.

        Raises:
            RankLost: rank 0 has ended, or sent nothing in time.
        """
        first = torch.empty(FIRST_PART, dtype=torch.uint8)
        self._broadcast(first)
        data = bytes(first.numpy())
        size = int.from_bytes(data[:8], "little")
        if 8 + size > FIRST_PART:
            rest = torch.empty(8 + size - FIRST_PART, dtype=torch.uint8)
            self._broadcast(rest)
            data += bytes(rest.numpy())
        message = pickle.loads(data[8 : 8 + size])
        assert isinstance(message, RankMessage)
        return message

    def exchange(self, values: list[int]) -> list[list[int]]:
        """Return the ``values`` of every rank. Their number must be equal on all ranks.

        Raises:
            RankLost: a rank did not answer in time.
        """
        own = torch.tensor(values, dtype=torch.int64)
        return self._gather(own, self._group, "a comparison of the ranks").tolist()

    def all_done(self, done: bool, what: str) -> None:
        """Wait until every rank has finished the action ``what``.

        Raises:
            RankLost: a rank has ended, or raised an error in the action.
        """
        answers = self._gather(torch.tensor([done], dtype=torch.int64), self._calls, what)[:, 0].tolist()
        if failed := [rank for rank, answer in enumerate(answers) if not answer and rank != self.rank]:
            raise RankLost(during=what, reason=f"rank {failed[0]} could not do the same")

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the ``value`` of every rank. The values may differ in size.

        Raises:
            RankLost: a rank did not answer in time.
        """
        answers: list[Any] = [None] * self.ranks
        with named_errors("the start"):
            dist.all_gather_object(answers, value, group=self._group)
        return answers

    def close(self) -> None:
        """Close the connections. A rank that still waits for this one receives an error at once."""
        for group in (self._group, self._calls):
            dist.destroy_process_group(group)

    def _broadcast(self, data: torch.Tensor) -> None:
        with named_errors("the message of a step"):
            dist.broadcast(data, self._first, group=self._group)

    def _gather(self, own: torch.Tensor, group: dist.ProcessGroup, during: str) -> torch.Tensor:
        answers = own.new_empty((self.ranks, *own.shape))
        with named_errors(during):
            all_gather_into(answers.view(-1), own, group)
        return answers

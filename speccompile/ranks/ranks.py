"""The ranks of one sharded model: the leader, the programs that all ranks run, and errors that reach all ranks."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from speccompile.errors import FollowerRank, RankError, RankLost, RanksDiffer
from speccompile.graph.arena import Arena
from speccompile.lowering.tier import Tier
from speccompile.ops import collective
from speccompile.ranks.channel import CALL_TIMEOUT, Change, Channel, RankMessage
from speccompile.ranks.state_digest import slot_digests
from speccompile.utils.devices import traits_of

A = TypeVar("A")
T = TypeVar("T")

#: Runs between two comparisons of the ranks' state.
COMPARE_EVERY = 16
#: The leader sends a sign of life after this share of the timeout without a message.
IDLE_SHARE = 0.25
#: Seconds between two checks whether the device has finished.
POLL_SECONDS = 20e-6


class Ranks:
    """The processes that hold the parts of one model.

    Rank 0 leads: only it has requests, a queue, a policy and clocks. Before each run it sends one message. The message
    has the program's name, and the writes of the host to the arena since the last run (rows, slots, prompts, limits,
    seeds, cancelled rows). The other ranks repeat these writes on their arena, and run the same program. Ranks
    therefore cannot choose differently, and every feature that only writes to the arena works on all of them.

    Args:
        group: the processes, in their order.
        timeout: seconds after which a rank that does not answer is lost.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: float) -> None:
        ranks = dist.get_process_group_ranks(group)
        self.timeout = timeout
        self._steps = collective.new_group(ranks, timeout)
        self._build = collective.new_group(ranks, timeout, longest=CALL_TIMEOUT)
        # This group serves until the build has ended: one rank may compile for minutes while another one waits.
        self.name = collective.connect_new("tensor_parallel", self._build)
        self._channel = Channel(ranks, timeout)
        self.rank, self.size = self._channel.rank, self._channel.ranks
        self._programs: dict[str, Tier] = {}
        self._calls: dict[str, Callable[[Any], object]] = {}
        self._changes: list[Change] = []
        self._arena: Arena | None = None
        self._lock = threading.RLock()
        self._runs = 0
        self._failed: RankError | None = None
        self._ended = threading.Event()
        self._spoke = threading.Event()

    @property
    def leads(self) -> bool:
        """Whether this is rank 0, which decides what runs."""
        return self.rank == 0

    # --- the beginning -------------------------------------------------------------------------------

    def check_equal(self, what: str, value: str) -> None:
        """Check that all ranks have the same ``value``.

        Raises:
            RanksDiffer: ``value`` differs between ranks.
        """
        answers = self._channel.gather_objects(value)
        if differing := [rank for rank, answer in enumerate(answers) if answer != answers[0]]:
            reason = f"rank 0 has {answers[0]}, rank {differing[0]} has {answers[differing[0]]}"
            raise RanksDiffer(what=what, reason=reason)

    def take(self, arena: Arena) -> None:
        """End the build. From now on all ranks repeat the host's writes to ``arena`` before the next run."""
        self._channel.all_done(True, "the build")
        collective.connect(self.name, self._steps)
        self._arena = arena
        if self.leads:
            arena.journal = self._changes
            arguments = (weakref.ref(self), self._ended, IDLE_SHARE * self.timeout)
            threading.Thread(target=_keep_in_touch, args=arguments, name="speccompile-ranks", daemon=True).start()

    def shared(self, tier: Tier) -> Tier:
        """Return ``tier`` as a tier that all ranks run when the leader runs it. Its name must be unique."""
        own = replace(tier, drafter=None)
        if not self.leads:
            # The leader keeps no programs: they refer to objects that refer to the leader.
            self._programs[tier.name] = own

        def on_all_ranks(*arguments: Any) -> None:
            with self._together():
                self._runs += 1
                compare = self._runs % COMPARE_EVERY == 0
                changes = tuple(self._changes)
                self._changes.clear()
                self._channel.send(RankMessage("run", tier.name, changes=changes, compare=compare))
                own.executable(*arguments)
                if compare:
                    self._compare()

        drafter = None if tier.drafter is None else self.shared(tier.drafter)
        return replace(tier, executable=on_all_ranks, drafter=drafter)

    def on_all(self, what: str, function: Callable[[A], T]) -> Callable[[A], T]:
        """Return a function that calls ``function`` on all ranks, with the leader's argument.

        Args:
            what: the function's name for messages, unique among these ranks. All ranks register it before they follow.
        """
        if not self.leads:
            self._calls[what] = function

        def on_all_ranks(argument: A) -> T:
            with self._together():
                self._channel.send(RankMessage("call", what, argument))
                return self._called(what, function, argument)

        return on_all_ranks

    def check_leads(self) -> None:
        """Check that this rank may start a run.

        Raises:
            FollowerRank: another rank leads.
            RankError: the ranks lost one another before.
        """
        if not self.leads:
            raise FollowerRank(rank=self.rank)
        if self._failed is not None:
            # A new instance of the class, since threads must not share a traceback.
            raise type(self._failed)(str(self._failed), **self._failed.fields) from self._failed

    # --- followers -----------------------------------------------------------------------------------

    def follow(self, read_weights: Callable[[], object]) -> None:
        """Repeat the leader's runs until the leader ends.

        Args:
            read_weights: called before the run in which the leader admits a request: weights may have changed in place.

        Raises:
            RankLost: the leader or another rank has ended, or did not answer in time.
            RanksDiffer: the ranks hold different sequences.
        """
        assert self._arena is not None
        try:
            while (message := self._channel.receive()).action != "end":
                if any(method == "reset_slot" for method, _ in message.changes):
                    read_weights()
                for method, values in message.changes:
                    getattr(self._arena, method)(*values)
                if message.action == "run":
                    self._programs[message.name].run_target()
                elif message.action == "call":
                    self._called(message.name, self._calls[message.name], message.argument)
                if message.compare:
                    self._compare()
        finally:
            self.abandon()

    # --- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the ranks' work. If this rank leads, its followers return from :meth:`follow`."""
        with self._lock:
            if self._ended.is_set():
                return
            if self.leads and self._failed is None:
                with contextlib.suppress(RankLost):
                    self._channel.send(RankMessage("end"))
            self.abandon()

    def after_fork(self) -> None:
        """Adapt to a forked child: the connections belong to the parent, so the child must not close them."""
        self._lock = threading.RLock()
        self._failed = RankLost(during="a forked process", reason="the ranks are connected to its parent")
        self._ended.set()

    def abandon(self) -> None:
        """Close the connections. A rank that waits for this one then raises at once."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._programs.clear()
        self._calls.clear()
        collective.disconnect(self.name)
        self._channel.close()
        for group in (self._steps, self._build):
            dist.destroy_process_group(group)

    # --- both ----------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _together(self) -> Iterator[None]:
        """Run one action at a time. An error in it leaves the ranks in different states, so no other action follows."""
        with self._lock:
            self.check_leads()
            if self._ended.is_set():
                raise RankLost(during="a step", reason="this rank has closed its speculator")
            try:
                yield
            except BaseException as error:
                self._fail(error)
                raise
            self._spoke.set()

    def _fail(self, error: BaseException) -> None:
        reason = f"rank {self.rank} raised {type(error).__name__}: {error}"
        self._failed = error if isinstance(error, RankError) else RankLost(during="a step", reason=reason)
        self.abandon()

    def _called(self, what: str, function: Callable[[A], T], argument: A) -> T:
        try:
            result = function(argument)
        except BaseException:
            self._channel.all_done(False, what)
            raise
        self._channel.all_done(True, what)
        return result

    def wait_for(self, finished: Callable[[], bool]) -> None:
        """Wait until ``finished`` returns True: a run has finished on the device. On a CPU a run finishes when it
        returns.

        Raises:
            RankLost: the run did not finish in time, so another rank did not join its collectives.
        """
        end = time.monotonic() + self.timeout
        while not finished():
            if time.monotonic() > end:
                error = RankLost(during="a step", reason=f"the device did not finish it within {self.timeout:g} s")
                with self._lock:
                    self._fail(error)
                raise error
            time.sleep(POLL_SECONDS)

    def _compare(self) -> None:
        """Compare the digests of all slots between ranks.

        Raises:
            RanksDiffer: the ranks hold different sequences.
            RankLost: the run before did not finish in time.
        """
        assert self._arena is not None
        if traits_of(self._arena.device).asynchronous:
            event = torch.cuda.Event()
            event.record()
            self.wait_for(event.query)
        answers = self._channel.exchange(slot_digests(self._arena))
        for rank, answer in enumerate(answers):
            if slots := [slot for slot, digest in enumerate(answer) if digest != answers[0][slot]]:
                reason = f"slot {slots[0]} of rank {rank} differs from that of rank 0"
                raise RanksDiffer(what="tokens, lengths or drafts", reason=reason)

    def speak(self) -> None:
        """Send a sign of life, unless something was sent since the last call.

        Raises:
            RankError: the ranks lost one another.
        """
        if self._spoke.is_set():
            self._spoke.clear()
            return
        with self._together():
            self._channel.send(RankMessage("wait"))


def _keep_in_touch(ranks: weakref.ref[Ranks], ended: threading.Event, interval: float) -> None:
    """Send signs of life while the leader has nothing to run. Without a message its followers would raise
    ``RankLost``."""
    while not ended.wait(interval):
        leader = ranks()
        if leader is None:
            return
        try:
            leader.speak()
        except RankError:
            # The next request raises it.
            return
        del leader

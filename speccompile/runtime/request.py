"""One sequence on its way through the engine, and what its owner sees of it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidOption, RequestFailed, error_line
from speccompile.graph.keys import Kind
from speccompile.hidden_states.records import RecordOrder
from speccompile.runtime.listener import Listener
from speccompile.runtime.score_records import RecordRequest, Records
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.token_stream import TokenStream
from speccompile.sampling.request import Sampling
from speccompile.utils.numbers import python_numbers

#: No two requests of a process have the same number.
_numbers = itertools.count()


class Driver(Protocol):
    """What a request needs of its engine."""

    def ended(self, request: Request) -> None:
        """Told once, when the request was ended from outside of a step."""

    def abandoned(self, request: Request) -> None:
        """Note that its last reader has left. Called by finalizers, which may run anywhere: takes no lock."""

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        """Work, or wait for another thread's work, until the request has more than ``seen`` tokens or ended."""

    async def wait_async(self, request: Request, seen: int) -> None:
        """The same, without blocking the event loop."""


class NoDriver:
    """Of a request that has left: it needs no steps, and keeps no engine alive."""

    def ended(self, request: Request) -> None: ...

    def abandoned(self, request: Request) -> None: ...

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None: ...

    async def wait_async(self, request: Request, seen: int) -> None: ...


@dataclass(frozen=True)
class Params:
    """What a request was submitted with, checked.

    Args:
        max_new_tokens: most new tokens; a request also ends at ``max_len``.
        eos: ids that end it.
        sampling: how its tokens are chosen; None is greedily, and by nothing but the logits.
        priority: of two waiting requests, the one with the larger number goes first.
        patient: nobody watches its tokens come, so that prompts of its kind may be read before it goes on.
        reuse: it may take the KV of another text that begins like it.
        tokenizer: turns its tokens into ``Result.text``.
        wanted: what it wants to know beside its tokens.
        num_draft_tokens: most drafts of a step; None is as many as the tier has.
        record: its hidden states are to be saved; None if not.
    """

    max_new_tokens: int
    eos: tuple[int, ...]
    sampling: Sampling | None = None
    priority: int = 0
    patient: bool = False
    reuse: bool = True
    tokenizer: PreTrainedTokenizerBase | None = None
    wanted: RecordRequest = field(default_factory=RecordRequest)
    num_draft_tokens: int | None = None
    record: RecordOrder | None = None

    @property
    def kind(self) -> Kind:
        """Of the executables that choose its tokens."""
        return "scored" if self.wanted else "sampled" if self.sampling is not None else "greedy"


@dataclass(frozen=True)
class Timings:
    """Seconds since a request was submitted; None for what it did not live to see.

    Args:
        queued: until it had a slot.
        first_token: until its first token.
        total: until it ended.
    """

    queued: float | None
    first_token: float | None
    total: float


@dataclass(frozen=True)
class Result:
    """What became of a request.

    Args:
        token_ids: the new tokens, an EOS id included.
        text: of them, special tokens left out; None without a tokenizer.
        finish_reason: ``eos``, ``stop``, ``max_new_tokens``, ``max_len`` or ``cancelled``.
        stats: prompt, reused and draft tokens, acceptance.
        logprobs: of each new token its natural log-probability by the model's own logits, before any processor (vLLM's
            "raw"); None unless asked for, as all that follow.
        prompt_logprobs: likewise of each prompt token behind those in front of it; None for the first, which has
            nothing in front of it. As many as were read, if it was cancelled before all were.
        logits: float32 ``[new, V]``, the model's own.
        scores: float32 ``[new, V]``: logits behind all processors, from which the tokens were chosen.
    """

    token_ids: list[int]
    text: str | None
    finish_reason: str
    timings: Timings
    stats: RequestStats
    logprobs: list[float] | None = None
    prompt_logprobs: list[float | None] | None = None
    logits: torch.Tensor | None = field(default=None, repr=False)
    scores: torch.Tensor | None = field(default=None, repr=False)

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens per target pass; 0.0 if prefill emitted them all."""
        return self.stats.acceptance_length


class Request:
    """Made by :meth:`speccompile.runtime.engine.Engine.submit`. Iterating over it yields its new tokens as they come.

    Waiting for a token (iterating, :meth:`result`) steps the engine, unless another thread is doing so.

    ``error`` is what ended it, if its ``finish_reason`` is ``error``.
    """

    def __init__(
        self,
        driver: Driver,
        prompt: list[int],
        params: Params,
        listener: Listener,
        stats: RequestStats,
        records: Records,
    ) -> None:
        self.number = next(_numbers)
        self.prompt = prompt
        self.params = params
        self.listener = listener
        self.stats = stats
        self.records = records
        self.new_tokens: list[int] = []
        self.error: Exception | None = None
        #: Its place in the arena (-1 while it waits), and for how many of its tokens that holds KV.
        self.slot = -1
        self.cached = 0
        #: It has let go of what it owned, and its listener was told.
        self.closed = False
        #: Those that read or wait for it.
        self.readers: set[object] = set()
        self.driver: Driver = driver
        self._lock = threading.Lock()
        self._submitted = time.perf_counter()
        self._admitted: float | None = None
        self._first_token: float | None = None
        self._newest_token: float | None = None
        self._ended: float | None = None

    def __repr__(self) -> str:
        state = self.finish_reason or ("waiting" if self.slot < 0 else f"in slot {self.slot}")
        return f"<Request of {len(self.prompt)} tokens, {len(self.new_tokens)} new, {state}>"

    # --- for its owner ---------------------------------------------------------------------------

    @property
    def finished(self) -> bool:
        return bool(self.stats.finish_reason)

    @property
    def finish_reason(self) -> str:
        """Empty while it waits or runs; then as in :class:`Result`, or ``error``."""
        return self.stats.finish_reason

    def cancel(self) -> bool:
        """End it here, from any thread: no token comes after this. False if it had ended already."""
        if not self.end("cancelled"):
            return False
        self.driver.ended(self)
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait until it ends. Of a request that was cancelled, or whose stream was left before its end, this is what
        it had by then, with ``finish_reason`` ``cancelled``.

        Args:
            timeout: seconds; it goes on after them.

        Raises:
            RequestFailed: it ended with an error of its own, which is the cause.
            TimeoutError: it has not ended in time.
        """
        timeout = python_numbers(timeout)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout == timeout):
            raise InvalidOption(where="result", name="timeout", value=timeout, reason="it has to be seconds, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        reader = object()
        self.readers.add(reader)
        try:
            while not self.finished:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the request has not ended within {timeout} s")
                # No wait is longer than that, for a lock.
                longest = None if left is None else min(left, threading.TIMEOUT_MAX)
                self.driver.wait(self, len(self.new_tokens), longest)
        finally:
            self.readers.discard(reader)
        self.raise_error()
        tokens = list(self.new_tokens)
        tokenizer = self.params.tokenizer
        text = None if tokenizer is None else str(tokenizer.decode(tokens, skip_special_tokens=True))
        records, count = self.records, len(tokens)
        return Result(
            tokens,
            text,
            self.finish_reason,
            self.timings,
            self.stats,
            records.logprobs(count),
            records.prompt_logprobs,
            records.logits(count),
            records.scores(count),
        )

    def stream(self) -> TokenStream:
        """Its new tokens from the first one on, to iterate over with ``for`` or ``async for``. A stream that is left
        before its end cancels the request; see :class:`TokenStream`."""
        return TokenStream(self)

    def __iter__(self) -> Iterator[int]:
        return iter(self.stream())

    def __aiter__(self) -> AsyncIterator[int]:
        return aiter(self.stream())

    @property
    def timings(self) -> Timings:
        """Up to now, or up to its end."""
        end = time.perf_counter() if self._ended is None else self._ended

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self._submitted

        return Timings(since(self._admitted), since(self._first_token), end - self._submitted)

    def raise_error(self) -> None:
        if self.error is not None:
            raise RequestFailed(reason=error_line(self.error)) from self.error

    # --- for the engine --------------------------------------------------------------------------

    @property
    def room(self) -> int:
        """How many more tokens it may have, ``max_len`` left aside."""
        return self.params.max_new_tokens - len(self.new_tokens)

    @property
    def on_host(self) -> bool:
        """The host decides what each of its tokens may be."""
        return self.params.sampling is not None and self.params.sampling.on_host

    @property
    def host_error(self) -> BaseException | None:
        """What one of its processors on the host raised."""
        call = None if self.params.sampling is None else self.params.sampling.host_call
        return None if call is None else call.error

    def admit(self, slot: int, cached: int) -> None:
        """It owns ``slot``, which holds the KV of its first ``cached`` tokens."""
        self.slot, self.cached = slot, cached
        self.stats.reused_tokens = cached
        self._admitted = time.perf_counter()

    def lap(self) -> tuple[float, bool]:
        """Seconds since the call before, at the first call since it was submitted; and whether this is the first."""
        before, self._newest_token = self._newest_token, time.perf_counter()
        return self._newest_token - (self._submitted if before is None else before), before is None

    def add(self, tokens: list[int]) -> bool:
        """Append emitted tokens; False if it has ended meanwhile, and gets no more."""
        with self._lock:
            if self.finished:
                return False
            if self._first_token is None:
                self._first_token = time.perf_counter()
            self.new_tokens.extend(tokens)
            self.stats.new_tokens += len(tokens)
            return True

    def end(self, reason: str, error: Exception | None = None) -> bool:
        """The first end counts; false for any later one."""
        with self._lock:
            return self._end(reason, error)

    def abandon(self) -> None:
        """Cancel it, if nothing else reads it. A finalizer may call this in the middle of anything, also of what is
        done under its lock: if that is held, its engine ends it before the next step."""
        if self.readers or self.finished:
            return
        if self._lock.acquire(blocking=False):
            try:
                self._end("cancelled")
            finally:
                self._lock.release()
        self.driver.abandoned(self)

    def _end(self, reason: str, error: Exception | None = None) -> bool:
        if self.finished:
            return False
        self.error = error
        self._ended = time.perf_counter()
        # Last, since waiting threads read it without the lock.
        self.stats.finish_reason = reason
        return True

    def after_fork(self) -> None:
        """In a forked child: a thread of the parent may hold the lock."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """It has ended and owns nothing any more: tell its listener."""
        self.closed = True
        self.driver = NoDriver()
        try:
            self.listener.end()
        except BaseException as error:
            with self._lock:
                self.error = self.error or as_exception(error)
                self.stats.finish_reason = "error"
            raise


def as_exception(error: BaseException) -> Exception:
    """What a request keeps of the wish to stop everything (``KeyboardInterrupt``), which is no error of its own."""
    return error if isinstance(error, Exception) else RuntimeError(f"interrupted by {error!r}")

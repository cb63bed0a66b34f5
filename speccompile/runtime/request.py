"""A request: one sequence in the engine, and its interface for the caller."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Literal, Protocol, overload

from speccompile.errors import InvalidOption, RequestFailed, error_line
from speccompile.runtime.detokenizer import text_of
from speccompile.runtime.listener import Listener
from speccompile.runtime.params import Params
from speccompile.runtime.proposal import NO_PROPOSAL, Proposal
from speccompile.runtime.result import Result, Timings
from speccompile.runtime.score_records import Records
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.text_stream import TextStream
from speccompile.runtime.token_stream import TokenStream
from speccompile.utils.numbers import python_numbers

#: Source of request numbers, which are unique in the process.
_numbers = itertools.count()


class Driver(Protocol):
    """The engine's side of a request."""

    def ended(self, request: Request) -> None:
        """Receive ``request``, which was ended outside of a step. Called once."""

    def abandoned(self, request: Request) -> None:
        """Receive ``request``, whose last reader is gone. Finalizers call this at any time, so it acquires no lock."""

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        """Step, or wait for a step of another thread, until the request has more than ``seen`` tokens or has ended."""

    async def wait_async(self, request: Request, seen: int) -> None:
        """:meth:`wait` without blocking the event loop."""


class NoDriver:
    """The driver of a request that was retired. It needs no steps, and keeps no engine alive."""

    def ended(self, request: Request) -> None: ...

    def abandoned(self, request: Request) -> None: ...

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None: ...

    async def wait_async(self, request: Request, seen: int) -> None: ...


class Request:
    """One request, created by :meth:`speccompile.runtime.engine.Engine.submit`. Iteration yields its new tokens as they
    arrive.

    Waiting for a token (iteration, :meth:`result`) steps the engine, unless another thread does.

    ``error`` is the error that ended it, if its ``finish_reason`` is ``error``.
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
        #: A number for each token of the prompt. Prompts with equal numbers have equal KV: images are compared, too.
        self.identities = prompt if params.features is None else params.features.identities(prompt)
        self.params = params
        self.listener = listener
        self.stats = stats
        self.records = records
        self.new_tokens: list[int] = []
        #: For each new token the drafter that proposed it, by its index in ``Mode.drafter_names``, ``GUIDE_SOURCE`` for
        #: a draft that its guide forces, None for a token that the model chose itself.
        self.drafted_by: list[int | None] = []
        self.error: Exception | None = None
        #: Its slot in the arena (-1 while it waits), and the number of its tokens with KV in that slot.
        self.slot = -1
        self.cached = 0
        #: The drafts for its next step.
        self.proposal: Proposal = NO_PROPOSAL
        #: Whether it owns nothing any more, and its listener was notified of the end.
        self.closed = False
        #: The readers that iterate over it or wait for it.
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
        """Whether the request has ended, for any reason."""
        return bool(self.stats.finish_reason)

    @property
    def finish_reason(self) -> str:
        """Empty while the request waits or runs; then a reason of :class:`Result`, or ``error``."""
        return self.stats.finish_reason

    def cancel(self) -> bool:
        """End the request, from any thread. It receives no token afterwards. Return False if it had already ended."""
        if not self.end("cancelled"):
            return False
        self.driver.ended(self)
        return True

    def result(self, timeout: float | None = None) -> Result:
        """Wait until the request ends. A request that was cancelled, or whose stream was left before its end, returns
        its tokens so far, with ``finish_reason`` ``cancelled``.

        Args:
            timeout: seconds. The request continues afterwards.

        Raises:
            RequestFailed: the request ended with an error, which is the cause.
            TimeoutError: the request has not ended in time.
        """
        timeout = python_numbers(timeout)
        if timeout is not None and not (isinstance(timeout, int | float) and timeout == timeout):
            raise InvalidOption(where="result", name="timeout", value=timeout, reason="it must be seconds, or None")
        deadline = None if timeout is None else time.monotonic() + timeout
        reader = object()
        self.readers.add(reader)
        try:
            while not self.finished:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise TimeoutError(f"the request has not ended within {timeout} s")
                # A lock accepts no longer timeout.
                longest = None if left is None else min(left, threading.TIMEOUT_MAX)
                self.driver.wait(self, len(self.new_tokens), longest)
        finally:
            self.readers.discard(reader)
        self.raise_error()
        tokens = list(self.new_tokens)
        tokenizer = self.params.tokenizer
        text = None if tokenizer is None else text_of(tokenizer, self.prompt, tokens)
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
            records.top_logprobs(count),
            records.prompt_best,
            records.prompt_top_logprobs,
        )

    @overload
    def stream(self, *, text: Literal[False] = False) -> TokenStream: ...

    @overload
    def stream(self, *, text: Literal[True]) -> TextStream: ...

    def stream(self, *, text: bool = False) -> TokenStream | TextStream:
        """Return a stream of the new tokens from the first one on, for ``for`` or ``async for``. A stream that is left
        before its end cancels the request; see :class:`TokenStream`.

        Args:
            text: yield the text of the tokens instead. A piece is not the text of a single token, since a character may
                have several tokens: see :class:`TextStream`. It needs ``submit(tokenizer=)``.

        Raises:
            InvalidOption: ``text`` is True, and the request has no tokenizer.
        """
        tokenizer = self.params.tokenizer
        if not text:
            return TokenStream(self)
        if tokenizer is None:
            reason = "the request has no tokenizer; pass submit(tokenizer=tokenizer)"
            raise InvalidOption(where="stream", name="text", value=text, reason=reason)
        return TextStream(TokenStream(self), tokenizer, self.prompt)

    def __iter__(self) -> Iterator[int]:
        return iter(self.stream())

    def __aiter__(self) -> AsyncIterator[int]:
        return aiter(self.stream())

    @property
    def timings(self) -> Timings:
        """Seconds up to now, or up to the request's end."""
        end = time.perf_counter() if self._ended is None else self._ended

        def since(moment: float | None) -> float | None:
            return None if moment is None else moment - self._submitted

        return Timings(since(self._admitted), since(self._first_token), end - self._submitted)

    def raise_error(self) -> None:
        """Raise the error of a failed request; do nothing for any other.

        Raises:
            RequestFailed: the request failed.
        """
        if self.error is not None:
            raise RequestFailed(reason=error_line(self.error)) from self.error

    # --- for the engine --------------------------------------------------------------------------

    @property
    def tokens_left(self) -> int:
        """The number of further tokens that it may have, apart from ``max_len``."""
        return self.params.max_new_tokens - len(self.new_tokens)

    @property
    def on_host(self) -> bool:
        """Whether the host is called before each of its steps."""
        return self.params.sampling is not None and self.params.sampling.on_host

    @property
    def host_error(self) -> BaseException | None:
        """The error that its guide or one of its processors on the host raised."""
        sampling = self.params.sampling
        called = () if sampling is None else (sampling.host_call, sampling.follower)
        return next((call.error for call in called if call is not None and call.error is not None), None)

    def forced_drafts(self, index: int, count: int) -> int:
        """The number of the first of ``count`` drafts of a chain from new token ``index`` on that its guide forces."""
        sampling = self.params.sampling
        if sampling is None or sampling.follower is None:
            return 0
        return sampling.follower.forced_drafts(len(self.prompt) + index, count)

    @property
    def tokens(self) -> list[int]:
        """Prompt and new tokens."""
        return self.prompt + self.new_tokens

    @property
    def known_by(self) -> list[int]:
        """The numbers of its tokens, by which slots find the KV of a known prefix."""
        return self.identities + self.new_tokens

    @property
    def decodes_last(self) -> bool:
        """Whether a decode step can process its newest token; else a chunk of its prompt must."""
        features = self.params.features
        return bool(self.new_tokens) or (self.identities[-1] >= 0 and (features is None or features.decodes_last))

    @property
    def length(self) -> int:
        """The number of its tokens."""
        return len(self.prompt) + len(self.new_tokens)

    @property
    def admitted(self) -> bool:
        """Whether it has had a slot."""
        return self._admitted is not None

    def admit(self, slot: int, cached: int, known: int = 0) -> None:
        """Assign ``slot``, which holds the KV of its first ``cached`` tokens. ``known`` tokens had KV in some slot."""
        self.slot, self.cached = slot, cached
        if self.admitted:
            self.stats.reread_tokens += self.length - cached
            return
        self.stats.reused_tokens = cached
        self.stats.reread_tokens = max(0, known - cached)
        self._admitted = time.perf_counter()

    def stop(self) -> None:
        """Lose the slot. The request waits for another one, in which its tokens are read again."""
        self.slot, self.cached, self.proposal = -1, 0, NO_PROPOSAL
        if not self.new_tokens:
            self.records.restart_prompt()

    def note_token(self) -> tuple[float, bool]:
        """Record the arrival of new tokens.

        Returns:
            Seconds since the previous call, or since the submission; and whether this is the first call.
        """
        before, self._newest_token = self._newest_token, time.perf_counter()
        return self._newest_token - (self._submitted if before is None else before), before is None

    def add(self, tokens: list[int], sources: Sequence[int | None] = ()) -> bool:
        """Append emitted tokens, the first of which were drafts of ``sources``. Return False, and append none, if the
        request has ended meanwhile."""
        with self._lock:
            if self.finished:
                return False
            if self._first_token is None:
                self._first_token = time.perf_counter()
            # Added before the tokens, which readers read without the lock.
            self.drafted_by.extend([*sources, *[None] * (len(tokens) - len(sources))])
            self.new_tokens.extend(tokens)
            self.stats.new_tokens += len(tokens)
            return True

    def end(self, reason: str, error: Exception | None = None) -> bool:
        """End the request. Return False if it had already ended: the first reason stays."""
        with self._lock:
            return self._end(reason, error)

    def abandon(self) -> None:
        """Cancel the request if it has no other reader. A finalizer may call this at any time, also while this thread
        holds the lock: the engine then ends the request before the next step."""
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
        # Written last, since waiting threads read it without the lock.
        self.stats.finish_reason = reason
        return True

    def after_fork(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may hold it."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Notify the listener of the end. The request has ended and owns nothing any more."""
        self.closed = True
        self.driver = NoDriver()
        # The caller may keep the request for long.
        self.params = replace(self.params, features=None)
        try:
            self.listener.end()
        except BaseException as error:
            with self._lock:
                self.error = self.error or as_exception(error)
                self.stats.finish_reason = "error"
            raise


def as_exception(error: BaseException) -> Exception:
    """Return the error for a request that ``error`` ended: an ``Exception`` itself; for an interrupt a RuntimeError."""
    return error if isinstance(error, Exception) else RuntimeError(f"interrupted by {error!r}")

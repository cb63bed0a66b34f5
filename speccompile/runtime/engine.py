"""The engine: requests come, stream and go, from any thread, while one thread at a time steps."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from speccompile.errors import Closed, InsideStep, InvalidOption
from speccompile.lowering.tier import Kind
from speccompile.lowering.workers import release_workers
from speccompile.runtime.inputs import check_max_new_tokens, check_options, read_prompt
from speccompile.runtime.interrupts import deferred_interrupts
from speccompile.runtime.listener import Listener, Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.records import Records, Wanted, check_flag, check_kept
from speccompile.runtime.request import Params, Request
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.stepper import Stepper
from speccompile.runtime.target import EosTokens, Target

# How long a thread that drives for async readers looks away when they have everything.
IDLE_SECONDS = 0.01


@dataclass(frozen=True)
class Capacity:
    """What the engine has room for now.

    Args:
        slots: all of them; ``free_slots`` of them have no owner.
        waiting: requests without a slot; ``room`` more would be taken.
    """

    slots: int
    free_slots: int
    waiting: int
    room: int


class Engine(Stepper):
    """Continuous batching over the slots of one arena. A context manager that closes itself.

    Whoever waits for a request steps for all of them, so that no thread has to be started; :meth:`serve` is there for
    one that does nothing else. Any thread may submit, cancel and wait at any time. Callbacks (streamers, stopping
    criteria) run inside of steps: they may submit and cancel, but not wait.

    What goes wrong with one request (its callback raises, its logits are NaN, its prompt finds no memory) ends that
    request with that error. What goes wrong with a whole step ends all requests in it.
    """

    def __init__(self, target: Target, **stepper: Any) -> None:
        super().__init__(state_of_weights=target.state_of_weights, **stepper)
        self._target = target
        self._turn_lock = threading.Lock()
        self._turn_owner: int | None = None
        # Guards what follows, and tells waiting threads that a turn has ended.
        self._changed = threading.Condition()
        self._begun = 0
        self._turns = 0
        self._waiting_threads = 0
        # Threads that do nothing but step: while there are any, nobody else takes turns to get what he waits for.
        self._servers: set[int] = set()
        self._closed = False
        self._async_readers: dict[asyncio.Event, tuple[asyncio.AbstractEventLoop, Request, int]] = {}
        self._async_driver: threading.Thread | None = None
        # Requests that ended outside of a step and still have a slot, a row or a listener.
        self._ended: deque[Request] = deque()
        _open_engines.add(self)

    # --- requests ------------------------------------------------------------------------------------

    def submit(
        self,
        ids: Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int = 128,
        eos_token_id: EosTokens = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: Streamer | None = None,
        do_sample: bool | None = None,
        seed: int | None = None,
        priority: int = 0,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
        output_logits: bool = False,
        output_scores: bool = False,
        **options: Any,
    ) -> Request:
        """Ask for the continuation of one prompt. Returns at once.

        Args:
            ids: token ids ``[P]`` or ``[1, P]``.
            max_new_tokens: most new tokens. A request also ends at ``max_len``.
            eos_token_id: one or several ids that end it; None takes those of the model's generation_config.
            stop: text or texts that end it, with the token that completes one; needs ``tokenizer``.
            stopping_criteria: transformers' ``StoppingCriteria``, one or several, asked after each token with this
                request's ids ``[1, P + new]`` and ``None`` for scores.
            tokenizer: for ``stop``, and for ``Result.text``.
            streamer: a transformers streamer of this request's own.
            do_sample: draw tokens instead of taking the most likely one; None is what the generation_config says.
            seed: of what is drawn, 0 to 2**63 - 1; None takes one from torch's default generator. The same seed and
                options give the same text, whatever drafts and whoever runs beside it.
            priority: of two waiting requests, the one with the larger number goes first.
            logprobs: ``Result.logprobs``, of each new token.
            prompt_logprobs: ``Result.prompt_logprobs``, of each prompt token. The whole prompt is read for them: KV of
                another text that begins like it is not reused.
            output_logits, output_scores: ``Result.logits`` and ``Result.scores``, of each new token and the whole
                vocabulary; need ``wrap(scores=True)``.
            options: of the sampling pipeline, as transformers names them (:data:`speccompile.sampling.OPTIONS`):
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p`` (these with ``do_sample=True``),
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``,
                ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens``, ``forced_eos_token_id``,
                ``suppress_tokens``, ``begin_suppress_tokens``, ``guide``, ``prefix_allowed_tokens_fn``. What is not
                given is what the generation_config says. A slot has room for 256 ids of ``logit_bias``, 256 of
                ``suppress_tokens``, 64 of ``begin_suppress_tokens``, 64 bad words of up to 8 tokens, and n-grams of up
                to 16 tokens; more is refused.

        Raises:
            QueueFull: as many requests wait as may.
            Closed: the engine was closed.
            UserError: an argument is not valid.
        """
        others = (
            "ids, max_new_tokens, eos_token_id, stop, stopping_criteria, tokenizer, streamer, do_sample, seed, "
            "priority, logprobs, prompt_logprobs, output_logits, output_scores"
        )
        check_options("submit", options, others)
        self._target.check()
        prompt = read_prompt(ids, 0, self.arena.layout)
        check_max_new_tokens("submit", max_new_tokens)
        check_streamer(streamer)
        check_tokenizer(tokenizer)
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
            reason = f"it has to be an int in {-(2**63)} .. {2**63 - 1}"
            raise InvalidOption(where="submit", name="priority", value=priority, reason=reason)
        check_flag("submit", "logprobs", logprobs)
        check_flag("submit", "prompt_logprobs", prompt_logprobs)
        check_kept("submit", "output_logits", output_logits, self.arena)
        check_kept("submit", "output_scores", output_scores, self.arena)
        eos = self._target.eos(eos_token_id)
        params = Params(
            max_new_tokens=max_new_tokens,
            eos=tuple(eos),
            sampling=self._target.sampling("submit", options, do_sample=do_sample, seed=seed, eos=eos),
            priority=priority,
            reuse=not prompt_logprobs,
            tokenizer=tokenizer,
            wanted=Wanted(logprobs, prompt_logprobs, output_logits, output_scores),
        )
        criteria = make_criteria(stop, tokenizer, stopping_criteria)
        request = self.new_request(prompt, params, torch.tensor([prompt]), streamer, criteria)
        try:
            self.enqueue([request])
        except KeyboardInterrupt:
            # It waits already, and its owner will never know it.
            request.cancel()
            raise
        return request

    def new_request(
        self,
        prompt: list[int],
        params: Params,
        shown: torch.Tensor,
        streamer: Streamer | None,
        criteria: StoppingCriteriaList,
    ) -> Request:
        """A request that is not queued yet. ``shown`` ``[1, P]`` is the prompt as streamers and criteria see it."""
        self._target.check_prompt(prompt)
        if params.kind != "greedy":
            self._prepare_in_turn(params.kind)
        layout = self.arena.layout
        room = min(params.max_new_tokens, layout.max_len - len(prompt))
        listener = Listener(shown, room, streamer, criteria)
        stats = RequestStats(layout.max_draft_len, prompt_tokens=len(prompt))
        return Request(self, prompt, params, listener, stats, Records(params.wanted, self.arena))

    def _prepare_in_turn(self, kind: Kind) -> None:
        """The first request of a kind waits until its executables are there; so does a step that another thread does
        meanwhile."""
        if self._turn_owner == threading.get_ident():
            self.prepare(kind)
            return
        with self._own_turn():
            self.prepare(kind)

    def enqueue(self, requests: list[Request]) -> None:
        """Queue all of them, or none.

        Raises:
            QueueFull, Closed.
        """
        with deferred_interrupts(), self._changed:
            if self._closed:
                raise Closed()
            self.waiting.push(requests, self.slots.free)
            self._changed.notify_all()

    def capacity(self) -> Capacity:
        """What there is room for now; another thread may change it at once."""
        free, waiting = self.slots.free, len(self.waiting)
        return Capacity(self.arena.layout.max_batch, free, waiting, max(0, self.waiting.limit + free - waiting))

    # --- stepping ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Nothing waits, nothing runs, and no step is on."""
        begun = self._begun
        if self._turn_lock.locked():
            return False
        # A turn that begins meanwhile may have a request in its hands, no longer in the queue and not yet in a slot.
        return super().idle and not self._turn_lock.locked() and begun == self._begun

    def step(self) -> list[Request]:
        """One step: read waiting prompts within the budget, then run one tier over all rows; returns the requests that
        had a row.

        Raises:
            Closed, InsideStep.
        """
        if self._closed:
            raise Closed()
        self._refuse_callback("step()")
        with self._own_turn():
            return self._step()

    def run(self) -> None:
        """Step until nothing waits and nothing runs."""
        while not self.idle and not self._closed:
            self._turn(lambda: self.idle or self._closed)

    def serve(self) -> None:
        """Step until :meth:`close`, and sleep while there is nothing to do: for a thread of its own."""
        self._refuse_callback("serve()")
        with self._serving():
            while not self._closed:
                self._turn()
                with self._changed:
                    self._changed.wait_for(lambda: self._closed or not self.idle)

    @contextlib.contextmanager
    def _serving(self) -> Iterator[None]:
        me = threading.get_ident()
        self._servers.add(me)
        try:
            yield
        finally:
            with self._changed:
                self._servers.discard(me)
                # Whoever waits has to step for himself now.
                self._turns += 1
                self._changed.notify_all()

    def _turn(self, done: Callable[[], bool] = lambda: False, timeout: float | None = None) -> None:
        """Take a turn, or wait until another thread's turn has ended or ``done``, what the caller wants, is true."""
        self._refuse_callback("waiting for a request")
        turns = self._turns
        mine = not self._servers or threading.get_ident() in self._servers
        if mine:
            with self._own_turn(blocking=False) as own:
                if own:
                    self._step()
                    return
        with self._changed:
            self._waiting_threads += mine
            try:
                # The turn that did it may have ended before ``turns`` was read, and be the last for long.
                self._changed.wait_for(lambda: self._turns != turns or done(), timeout)
            finally:
                self._waiting_threads -= mine

    def _refuse_callback(self, what: str) -> None:
        if self._turn_owner == threading.get_ident():
            raise InsideStep(what=what)

    def _step(self) -> list[Request]:
        return [] if self._closed else self.run_step()

    @contextlib.contextmanager
    def _own_turn(self, *, blocking: bool = True) -> Iterator[bool]:
        """Have the turn, and clean up before and behind; without ``blocking`` False if another thread has it."""
        with deferred_interrupts():
            if not self._turn_lock.acquire(blocking):
                yield False
                return
            self._begun += 1
            self._turn_owner = threading.get_ident()
            try:
                self._retire_ended()
                yield True
                self._retire_ended()
            finally:
                interrupt, self._interrupt = self._interrupt, None
                if self.arena.device.type == "cpu" and (self._waiting_threads or super().idle):
                    # The next turn may be another thread's.
                    release_workers()
                self._turn_owner = None
                self._turn_lock.release()
                with self._changed:
                    self._turns += 1
                    self._changed.notify_all()
                    self._wake_async_readers()
                self._tidy()
            if interrupt is not None:
                raise interrupt

    def _tidy(self) -> None:
        """Clean up behind requests that ended outside of a step: now, or at the end of the turn that is on."""
        if self._ended:
            with self._own_turn(blocking=False):
                pass

    def _wake_async_readers(self) -> None:
        for woken, (loop, request, seen) in list(self._async_readers.items()):
            if request.finished or len(request.new_tokens) > seen:
                try:
                    loop.call_soon_threadsafe(woken.set)
                except RuntimeError:
                    # Its loop was closed under it: nobody reads on.
                    del self._async_readers[woken]
                    if request.end("cancelled"):
                        self._ended.append(request)

    def _retire_ended(self) -> None:
        while True:
            if self._closed:
                left = [*self.waiting.drain(), *self.running]
                self._ended.extend(request for request in left if request.end("cancelled"))
            if not self._ended:
                return
            self._retire([self._ended.popleft()])

    # --- waiting (what Request asks for) -------------------------------------------------------------

    def ended(self, request: Request) -> None:
        self.waiting.remove(request)
        self._ended.append(request)
        self._tidy()

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        def done() -> bool:
            return request.finished or len(request.new_tokens) > seen

        if not done():
            self._turn(done, timeout)

    async def wait_async(self, request: Request, seen: int) -> None:
        self._refuse_callback("waiting for a request")
        woken = asyncio.Event()
        try:
            with self._changed:
                # Looked at under the lock under which readers are woken: no token can come in between unseen.
                if request.finished or len(request.new_tokens) > seen:
                    return
                self._async_readers[woken] = (asyncio.get_running_loop(), request, seen)
                self._ensure_driver()
            await woken.wait()
        finally:
            with self._changed:
                self._async_readers.pop(woken, None)

    def _ensure_driver(self) -> None:
        if self._async_driver is None and self._async_readers and not self._closed:
            driver = threading.Thread(target=self._drive, name="speccompile-driver", daemon=True)
            driver.start()
            self._async_driver = driver

    def _drive(self) -> None:
        """Step for async readers, as long as there are any."""
        try:
            with self._serving():
                while self._async_readers and not self._closed:
                    if self.idle:
                        with self._changed:
                            self._changed.wait(IDLE_SECONDS)
                    self._turn()
        finally:
            # A reader may have come meanwhile, or somebody's callback asked this thread to exit.
            with self._changed:
                self._async_driver = None
                self._ensure_driver()

    # --- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel whatever waits or runs, and take no more requests."""
        with self._changed:
            self._closed = True
        if self._turn_owner == threading.get_ident():
            return  # In a callback: the turn that is on cleans up when it ends.
        with self._own_turn():
            pass

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A daemon thread that is in the middle of a step when the interpreter ends takes the process down with it."""
    for engine in list(_open_engines):
        engine.close()

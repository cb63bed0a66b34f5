"""The engine: requests come, stream and go, from any thread, while one thread at a time steps."""

from __future__ import annotations

import atexit
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, NoReturn

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList

from speccompile.errors import CannotCopy, InvalidOption
from speccompile.hidden_states.records import RecordOrder
from speccompile.runtime.inputs import check_options, read_num_draft_tokens, read_prompt
from speccompile.runtime.listener import Listener, Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.request import Params, Request
from speccompile.runtime.score_records import RecordRequest, Records, check_flag, check_kept
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.target import EosTokens, Target
from speccompile.runtime.turns import Turns
from speccompile.utils.forks import in_child
from speccompile.utils.interrupts import deferred_interrupts
from speccompile.utils.numbers import python_numbers


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


class Engine(Turns):
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
        _open_engines.add(self)
        if self.saver is not None:
            # One that is dropped without close() writes the records that wait. At exit _close_all does.
            self._dropped = weakref.finalize(self, self.saver.writer.close)
            self._dropped.atexit = False

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """For ``copy`` and ``pickle``.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy()

    # --- requests ------------------------------------------------------------------------------------

    def submit(
        self,
        ids: Sequence[int] | torch.Tensor,
        *,
        max_new_tokens: int | None = None,
        eos_token_id: EosTokens = None,
        stop: str | Sequence[str] | None = None,
        stopping_criteria: Any = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        streamer: Streamer | None = None,
        do_sample: bool | None = None,
        seed: int | None = None,
        priority: int = 0,
        num_draft_tokens: int | None = None,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
        output_logits: bool = False,
        output_scores: bool = False,
        record: bool | str = True,
        **options: Any,
    ) -> Request:
        """Ask for the continuation of one prompt. Returns at once.

        Args:
            ids: token ids ``[P]`` or ``[1, P]``.
            max_new_tokens: most new tokens; None is what the model's generation_config says (``max_new_tokens``, or
                ``max_length`` with the prompt), else 128. A request also ends at ``max_len``.
            eos_token_id: one or several ids that end it; None takes those of the model's generation_config.
            stop: text or texts that end it, with the token that completes one; needs ``tokenizer``.
            stopping_criteria: transformers' ``StoppingCriteria``, one or several, asked after each token with this
                request's ids ``[1, P + new]`` and ``None`` for scores.
            tokenizer: for ``stop``, and for ``Result.text``.
            streamer: a transformers streamer of this request's own.
            do_sample: draw tokens instead of taking the most likely one; None is what the generation_config says.
            seed: of what is drawn, 0 to 2**63 - 1; None takes one from torch's default generator. The same seed and
                options give the same text, whatever drafts and whoever runs beside it. A greedy request draws nothing:
                it may have a seed, as other requests of the same caller do, and its text is the same with any.
            priority: of two waiting requests, the one with the larger number goes first.
            num_draft_tokens: most drafts of each of its steps, 0 for none ever; None is as many as the tier has. Its
                text is the same.
            logprobs: ``Result.logprobs``, of each new token.
            prompt_logprobs: ``Result.prompt_logprobs``, of each prompt token. The whole prompt is read for them: KV of
                another text that begins like it is not reused.
            output_logits, output_scores: ``Result.logits`` and ``Result.scores``, of each new token and the whole
                vocabulary; need ``wrap(scores=True)``.
            record: where hidden states are saved, whether its own are, when it has ended by itself; a text is the id of
                its record, which is a number behind the files' prefix otherwise.
            options: of the sampling pipeline, as transformers names them (:data:`speccompile.sampling.OPTIONS`):
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p`` (these with ``do_sample=True``),
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``,
                ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens``, ``min_length`` (with the prompt),
                ``forced_eos_token_id``, ``suppress_tokens``, ``begin_suppress_tokens``, ``guide`` (of
                :mod:`speccompile.guides`),
                ``prefix_allowed_tokens_fn``, ``logits_processor``, ``watermarking_config``. What is not given is what
                the generation_config says.
                The last three are called on the host, once before each token, so this request has no drafts; others
                keep theirs. ``logits_processor`` is one of transformers' ``LogitsProcessor`` or a list of them, called
                with int64 ``[1, P + new]`` and float32 ``[1, V]``. It may keep memory of the tokens before: requests
                must not share such a processor. One of exactly the type that transformers builds of an option replaces
                that option, as there. Processors that are tensor operations alone keep drafts if they are
                given to ``wrap(logits_processor=...)``.
                A slot has room for 256 ids of ``logit_bias``, 256 of ``suppress_tokens``, 64 of
                ``begin_suppress_tokens``, 64 bad words of up to 8 tokens, and n-grams of up to 16 tokens; more is
                refused.

        Raises:
            QueueFull: as many requests wait as may.
            Closed: the engine was closed.
            UserError: an argument is not valid.
        """
        others = (
            "ids, max_new_tokens, eos_token_id, stop, stopping_criteria, tokenizer, streamer, do_sample, seed, "
            "priority, num_draft_tokens, logprobs, prompt_logprobs, output_logits, output_scores, record"
        )
        check_options("submit", options, others)
        self._target.check()
        prompt = read_prompt(ids, 0, self.arena.layout)
        max_new_tokens = self._target.new_tokens("submit", max_new_tokens, len(prompt))
        check_streamer(streamer)
        check_tokenizer(tokenizer)
        priority = python_numbers(priority)
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
            reason = f"it has to be an int in {-(2**63)} .. {2**63 - 1}"
            raise InvalidOption(where="submit", name="priority", value=priority, reason=reason)
        num_draft_tokens = read_num_draft_tokens("submit", num_draft_tokens, self.arena.layout)
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
            wanted=RecordRequest(logprobs, prompt_logprobs, output_logits, output_scores),
            num_draft_tokens=num_draft_tokens,
        )
        criteria = make_criteria(stop, tokenizer, stopping_criteria)
        params = replace(params, record=self.order_record("submit", record))
        try:
            request = self.new_request(prompt, params, torch.tensor([prompt]), streamer, criteria)
            self.enqueue([request])
        except KeyboardInterrupt:
            # It waits already, and its owner will never know it.
            request.cancel()
            raise
        except BaseException:
            if self.saver is not None and params.record is not None:
                self.saver.writer.give_up(params.record.id)
            raise
        return request

    def order_record(self, where: str, record: bool | str) -> RecordOrder | None:
        """What is to be saved of a request, by its argument ``record``.

        Raises:
            InvalidOption: it is no id of a new record, or nothing is saved here.
            RecordsNotWritten: earlier ones could not be.
        """
        if not isinstance(record, bool | str) or record == "":
            reason = "use True, False, or the id of its record"
            raise InvalidOption(where=where, name="record", value=record, reason=reason)
        if self.saver is None:
            if isinstance(record, str):
                reason = "hidden states are not saved here; wrap with save_hidden_states=..."
                raise InvalidOption(where=where, name="record", value=record, reason=reason)
            return None
        if record is False:
            return None
        return RecordOrder(self.saver.writer.order(record if isinstance(record, str) else None))

    def new_request(
        self,
        prompt: list[int],
        params: Params,
        shown: torch.Tensor,
        streamer: Streamer | None,
        criteria: StoppingCriteriaList,
    ) -> Request:
        """A request that is not queued yet. ``shown`` ``[1, P]`` is the prompt as streamers and criteria see it."""
        self._check_process()
        self._target.check_prompt(prompt)
        if params.sampling is not None and params.sampling.on_host:
            sizes = self.arena.layout.vocab_size, self.arena.device
            sampling = params.sampling.of_request(shown, len(prompt), *sizes)
            params = replace(params, sampling=sampling, num_draft_tokens=0)
        watched = not params.patient
        if not self.prepared(params.kind, watched=watched):
            self.prepare_in_turn(params.kind, watched=watched)
        layout = self.arena.layout
        room = min(params.max_new_tokens, layout.max_len - len(prompt))
        listener = Listener(shown, room, streamer, criteria)
        stats = RequestStats(layout.max_draft_len, prompt_tokens=len(prompt))
        return Request(self, prompt, params, listener, stats, Records(params.wanted, self.arena))

    def enqueue(self, requests: list[Request]) -> None:
        """Queue all of them, or none.

        Raises:
            QueueFull, Closed.
        """
        with deferred_interrupts(), self._changed:
            if self._closed:
                raise self.closed_error()
            self._end_abandoned()
            self.waiting.push(requests, self.slots.free)
            self._changed.notify_all()

    def capacity(self) -> Capacity:
        """What there is room for now; another thread may change it at once."""
        self._end_abandoned()
        self._tidy()
        free, waiting = self.slots.free, len(self.waiting)
        return Capacity(self.arena.layout.max_batch, free, waiting, max(0, self.waiting.limit + free - waiting))

    def close(self) -> None:
        """Cancel whatever waits or runs, take no more requests, and write the records that wait.

        Raises:
            RecordsNotWritten: the disk does not take them.
        """
        super().close()
        # In a callback the step that is on may still end a request: then records are written when the interpreter ends.
        if self.saver is not None and not self._forked and self._turn_owner != threading.get_ident():
            self._dropped.detach()
            self.saver.writer.close()

    def after_fork(self) -> None:
        super().after_fork()
        if self.saver is not None:
            # Its files are the parent's.
            self._dropped.detach()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_open_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_open_engines):
        engine.after_fork()


in_child(_after_fork)


@atexit.register
def _close_all() -> None:
    """A daemon thread that is in the middle of a step when the interpreter ends takes the process down with it."""
    for engine in list(_open_engines):
        engine.close()

"""The engine: any thread submits, reads and cancels requests, while one thread at a time steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, NoReturn

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.adapters.buffers import AdapterBuffers
from speccompile.errors import CannotCopy
from speccompile.graph.arena import Arena
from speccompile.graph.keys import KINDS, ChunkKind, Kind, TierName
from speccompile.lowering.tier import Executables, Tier
from speccompile.modes.base import HostDraft
from speccompile.policies.base import AnyPolicy
from speccompile.ranks.ranks import Ranks
from speccompile.runtime import open_engines
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.async_driver import AsyncDriver
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.departures import Departures
from speccompile.runtime.host_answers import HostAnswers
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.learning import OnlineTraining
from speccompile.runtime.listener import Streamer
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.options import EngineOptions, StepTraits
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.prompt_reader import PromptReader
from speccompile.runtime.request import Request
from speccompile.runtime.request_factory import RequestFactory
from speccompile.runtime.request_options import SubmitOptions
from speccompile.runtime.request_submitter import Capacity, RequestSubmitter
from speccompile.runtime.saver import Saver
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.segmented_drafter import SegmentedDrafter
from speccompile.runtime.shutdown import Shutdown
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.target import EosTokens, Target
from speccompile.runtime.tier_choice import TierChoice
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.timing import clock_of
from speccompile.runtime.turns import Turns
from speccompile.runtime.waiting import WaitingQueue
from speccompile.utils.devices import traits_of


class Engine:
    """Continuous batching over the slots of one arena. A context manager that closes itself.

    A thread that waits for a request steps for all requests, so no thread has to be started; :meth:`serve` is for a
    thread that only steps. Any thread may submit, cancel and wait at any time. Callbacks (streamers, stopping criteria)
    run inside of steps: they may submit and cancel, but not wait.

    An error of one request (its callback raises, its logits are NaN, its prompt finds no memory) ends that request. An
    error of a whole step ends all requests in it.

    It is composed of parts, one file each. None of them refers to the engine: it would keep its tensors until Python's
    collector runs::

        Engine -- RequestSubmitter  creates and queues requests; RequestFactory reads their arguments
               -- Turns             which thread steps; AsyncDriver steps for async readers
               -- OnlineTraining    trains a draft head from the sequences of requests
               -- Shutdown          what it does when it is closed or dropped, and in a forked child
               -- AdapterTable      the LoRA adapters that are loaded
                   -- Scheduler     one step
                       -- PromptReader, TierChoice, Policies, HostAnswers, Delivery, Departures
                       -- TierTable, Batch, Slots, WaitingQueue

    Args:
        target: the wrapped model.
        arena: state of all slots.
        executables: those of requests without special needs.
        make: builds the executables of another kind, when the first request needs them.
        make_mixed: builds the mixed tiers of a kind, when the first request whose tokens are watched is submitted.
        policy: chooses the draft length of each step.
        outcomes: results of each run, for the host.
        traits: what the executables require.
        options: of the caller.
        host_draft: a drafter on the host, called before each step.
        saver: saves hidden states of sequences; None if they are not saved.
        adapters: the arena's buffers of adapters; None if it has none.
        ranks: of a sharded model, which run what this engine runs.

    Attributes:
        prefix_reuse: whether ``slots`` reuse the KV of known prefixes.
    """

    def __init__(
        self,
        target: Target,
        arena: Arena,
        executables: Executables,
        make: Callable[[Kind], Executables],
        make_mixed: Callable[[Kind], Mapping[TierName, Tier]],
        policy: AnyPolicy,
        outcomes: Outcomes,
        *,
        traits: StepTraits,
        options: EngineOptions,
        host_draft: HostDraft | None = None,
        saver: Saver | None = None,
        adapters: AdapterBuffers | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        self.arena, self.traits, self.options, self.saver, self.ranks = arena, traits, options, saver, ranks
        device = traits_of(arena.device)
        budget = device.prefill_budget if options.prefill_budget is None else options.prefill_budget
        # With a budget in tokens no step reads a prompt along.
        self.table = table = TierTable(executables, make, make_mixed if budget is None else lambda kind: {})
        self.stats = stats = Stats(arena.layout.max_draft_len)
        self.batch, self.waiting = batch, waiting = Batch(arena), WaitingQueue(options.max_waiting)
        # KV of a decode step and of a prompt chunk differ in their last bits.
        self.prefix_reuse = options.prefix_reuse and not traits.one_shape
        self.slots = slots = Slots(
            arena,
            target.state_of_weights,
            reuse=self.prefix_reuse,
            clear=traits.reads_dead_places,
            state_checkpoints=options.state_checkpoints,
            prompts_differ=traits.prompts_differ,
        )
        # A longer chunk would pass over checkpoints.
        widths = sorted({width for width, _ in table.prefill})
        if options.state_checkpoints is not None:
            widths = [width for width in widths if width <= options.state_checkpoints] or widths[:1]
        self.policies = policies = Policies(
            policy,
            table.draft_lens,
            ready=traits.ready,
            measure=lambda: measure_tiers(arena, table.tiers, undrafted=traits.network_on_demand),
        )
        self.departures = departures = Departures(batch, slots, stats, saver)
        delivery = Delivery(departures, stats, arena.layout.max_len)
        self.answers = answers = HostAnswers(
            arena, departures, None if host_draft is None else HostDrafter(host_draft, arena)
        )
        # One clock for both, so that measurements arrive in the order of runs.
        clock = clock_of(arena.device)
        self.prompts = prompts = PromptReader(
            arena,
            table,
            batch,
            slots,
            waiting,
            departures,
            delivery,
            answers,
            outcomes,
            stats,
            PrefillBudget(widths, budget, fixed=traits.one_shape, flat=device.flat_chunk),
            clock,
        )
        self.choice = choice = TierChoice(arena, batch, table, policies, traits)
        # Results are read late only where the device runs beside the host, and where the next step needs nothing of
        # them: a draft of the host, whether a network drafts, how certain it is, or what must be cleared.
        asks = traits.network_on_demand or "draft_confidence" in arena or host_draft is not None
        waits = asks or traits.reads_dead_places
        self.scheduler = scheduler = Scheduler(
            arena,
            table,
            batch,
            slots,
            prompts,
            choice,
            policies,
            answers,
            delivery,
            departures,
            outcomes,
            stats,
            clock,
            late=device.asynchronous and not waits,
            clears_rejected=traits.reads_dead_places,
            drafter=SegmentedDrafter(arena, table, policies) if traits.segments else None,
        )
        self.turns = turns = Turns(scheduler, waiting, slots, departures, arena.device, saves=saver is not None)
        self.adapters = AdapterTable(adapters, arena, slots, waiting, turns)
        self._async_driver, self.training = AsyncDriver(turns), OnlineTraining(arena, turns, departures)
        self.submitter = RequestSubmitter(
            RequestFactory(target, arena, self.adapters, saver, drawn_options=traits.drawn_options),
            table,
            turns,
            slots,
            waiting,
            ranks,
            max_batch=arena.layout.max_batch,
            captured=traits.captured,
        )
        self._shutdown = Shutdown(turns, self._async_driver, self.training, ranks, saver)
        open_engines.add(self)
        if saver is not None:
            self._shutdown.write_when_dropped(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """For ``copy`` and ``pickle``.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy()

    # --- parts and state -----------------------------------------------------------------------------

    @property
    def tiers(self) -> dict[TierName, Tier]:
        """By draft length, row count and kind."""
        return self.table.tiers

    @property
    def mixed_tiers(self) -> dict[TierName, Tier]:
        """The tiers that read a prompt along."""
        return self.table.mixed_tiers

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of executables that requests may need, built or not."""
        return tuple(kind for kind in KINDS if kind != "drawn" or self.traits.drawn_options)

    @property
    def prefill_tiers(self) -> dict[tuple[int, ChunkKind], Tier]:
        """Prompt chunks, by width and kind."""
        return self.table.prefill

    @property
    def draft_lens(self) -> tuple[int, ...]:
        """The draft lengths of the tiers, ascending."""
        return self.table.draft_lens

    @property
    def tier(self) -> Tier:
        """The tier that ran last."""
        return self.scheduler.tier

    @property
    def failures(self) -> int:
        """Steps in a row, up to the newest one, that failed as a whole."""
        return self.scheduler.failures

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self.turns.closed

    @property
    def running(self) -> list[Request]:
        """Requests that own a slot."""
        return self.slots.owned

    @property
    def policy(self) -> AnyPolicy:
        """Chooses the draft length of each step. It may be replaced at any time; the new one starts without history."""
        return self.policies.policy

    @policy.setter
    def policy(self, policy: AnyPolicy) -> None:
        self.policies.policy = policy

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
        prediction: Sequence[int] | torch.Tensor | None = None,
        logprobs: bool = False,
        prompt_logprobs: bool = False,
        top_logprobs: int = 0,
        output_logits: bool = False,
        output_scores: bool = False,
        record: bool | str = True,
        adapter: str | None = None,
        client: str | Sequence[str] | None = None,
        **options: Any,
    ) -> Request:
        """Ask for the continuation of one prompt. Returns at once.

        Args:
            ids: token ids ``[P]`` or ``[1, P]``.
            max_new_tokens: Most new tokens. None is what the model's generation_config says (``max_new_tokens``, or
                ``max_length`` with the prompt), else 128. A request also ends at ``max_len``.
            eos_token_id: One or several ids that end a sequence. None takes those of the model's generation_config.
            stop: One or several texts that end a sequence; they need ``tokenizer``. It ends with the token that
                completes one.
            stopping_criteria: transformers' ``StoppingCriteria``, one or several. They are asked after each token with
                this request's ids ``[1, P + new]`` and ``None`` for scores.
            tokenizer: The tokenizer of the token ids. For ``stop``, ``Result.text`` and ``stream(text=True)``.
            streamer: A transformers streamer. Requests must not share one.
            do_sample: Whether tokens are drawn; otherwise the most likely one is chosen. None is what the
                generation_config says.
            seed: Seed of what is drawn. 0 to 2**63 - 1; None takes one from torch's default generator. The same seed
                and options give the same text, with any drafts and beside any other requests. A greedy request draws
                nothing: it may have a seed, as other requests of the same caller do, and its text is the same with any.
            priority: Of two waiting requests, the one with the larger number goes first; in the server, as in vLLM, the
                smaller.
            num_draft_tokens: Most draft tokens of a step, 0 for none. None is as many as the tier has. The text is the
                same.
            prediction: Token ids that the new text is expected to have; mode `prediction` drafts them. At most
                ``max_len`` of them. The text is the same with any.
            logprobs: Whether to return the log-probability of each new token. In ``Result.logprobs``.
            prompt_logprobs: Whether to return the log-probability of each prompt token. In ``Result.prompt_logprobs``.
                The whole prompt is read for them: KV of another text that begins like it is not reused.
                ``Result.prompt_best`` has the likeliest token at each place, and ``Result.prompt_top_logprobs`` the
                likeliest ``top_logprobs`` ones, at most 20.
            top_logprobs: How many of the likeliest tokens to return at each new token, 0 for none. In
                ``Result.top_logprobs``; needs ``wrap(scores=True)``.
            output_logits: Whether to return the model's own logits, of each new token. In ``Result.logits``, of the
                whole vocabulary; needs ``wrap(scores=True)``.
            output_scores: Whether to return the scores after all processors, of each new token. In ``Result.scores``,
                likewise.
            record: Whether hidden states are saved, where the wrap saves them, or the record's id. They are saved when
                the request has ended by itself. Without an id it is a number after the files' prefix.
            adapter: The name of the LoRA adapter that the model has. One of ``spec.adapters``; None is the model
                itself.
            client: Whose request it is: clients get slots by turns. A list has the widest name first, as in
                ``["10.0.0.7", "chat 12"]``: of one address, chats get slots by turns. The server names the API key or
                the address, and the HTTP request.
            options: of the sampling pipeline, as transformers names them (:data:`speccompile.sampling.OPTIONS`):
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``epsilon_cutoff``, ``eta_cutoff``
                (these with ``do_sample=True``), ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
                ``logit_bias``, ``sequence_bias``, ``remove_invalid_values``, ``renormalize_logits``,
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
                ``begin_suppress_tokens``, 256 sequences with a bias and 64 bad words of up to 8 tokens, and n-grams of
                up to 16 tokens; more is refused.

        Raises:
            QueueFull: as many requests wait as may, of all clients or of this one.
            Closed: the engine was closed.
            UserError: an argument is not valid.
        """
        given = SubmitOptions(
            max_new_tokens=max_new_tokens,
            eos_token_id=eos_token_id,
            stop=stop,
            stopping_criteria=stopping_criteria,
            tokenizer=tokenizer,
            streamer=streamer,
            do_sample=do_sample,
            seed=seed,
            priority=priority,
            num_draft_tokens=num_draft_tokens,
            prediction=prediction,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            top_logprobs=top_logprobs,
            output_logits=output_logits,
            output_scores=output_scores,
            record=record,
            adapter=adapter,
            client=client,
            sampling=options,
        )
        return self.submitter.submit(self, ids, given)

    def capacity(self) -> Capacity:
        """The current capacity. Another thread may change it at once."""
        return self.submitter.capacity()

    # --- stepping ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and no step is in progress."""
        return self.turns.idle

    def step(self) -> list[Request]:
        """One step: read waiting prompts within the budget, then run one tier over all rows; returns the requests that
        had a row.

        Raises:
            Closed, InsideStep.
        """
        return self.turns.step()

    def run(self) -> None:
        """Step until no request waits or runs."""
        self.turns.run()

    def serve(self) -> None:
        """Step until :meth:`close`, and sleep while there is nothing to do. Returns only then, so run it in a
        thread: ``threading.Thread(target=spec.engine.serve).start()``. Without it, a thread that waits for a request
        steps.
        """
        self.turns.serve()

    def prepare(self, kind: Kind, *, watched: bool = False) -> None:
        """Build the executables of a kind, from any thread; for requests whose tokens are ``watched``, its mixed tiers
        too. Other threads step meanwhile, unless the build itself runs the executables over the arena."""
        self.submitter.prepare(kind, watched=watched)

    # --- the driver of requests (speccompile.runtime.request.Driver) ---------------------------------

    def ended(self, request: Request) -> None:
        """Called when ``request`` has ended."""
        self.turns.ended(request)

    def abandoned(self, request: Request) -> None:
        """Called when nothing waits for ``request`` any longer."""
        self.turns.abandoned(request)

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        """Run steps until ``request`` has more than ``seen`` new tokens or has ended, or ``timeout`` seconds have
        passed."""

        def done() -> bool:
            return request.finished or len(request.new_tokens) > seen

        if not done():
            self.turns.turn(done, timeout)

    async def wait_async(self, request: Request, seen: int) -> None:
        """Wait until ``request`` has more than ``seen`` new tokens or has ended; the event loop is not blocked."""
        await self._async_driver.wait(request, seen)

    # --- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all requests, accept no more, and write the pending records.

        Raises:
            RecordsNotWritten: they cannot be written.
        """
        self._shutdown.close()

    def after_fork(self) -> None:
        """In a forked child."""
        self._shutdown.after_fork()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

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
from speccompile.multimodal.inputs import Features
from speccompile.policies.base import AnyPolicy
from speccompile.ranks.ranks import Ranks
from speccompile.runtime import open_engines
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.async_driver import AsyncDriver
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.host_calls import HostCalls
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.learning import HeadTraining
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
from speccompile.runtime.retirement import Retirement
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
from speccompile.runtime.unread_tokens import UnreadTokens
from speccompile.runtime.waiting import WaitingQueue
from speccompile.utils.devices import traits_of


class Engine:
    """Continuous batching over the slots of one arena. The engine is a context manager that closes itself.

    A thread that waits for a request runs steps for all requests, so no thread must be started. :meth:`serve` is for a
    thread that only runs steps. Any thread may submit, cancel and wait at any time. Callbacks (streamers, stopping
    criteria) run inside of steps: they may submit and cancel, but not wait.

    An error of one request (its callback raises, its logits are NaN, its prompt does not fit into memory) ends that
    request. An error of a whole step ends all requests in it.

    It is composed of parts, one file each. No part refers to the engine, which would keep
    tensors alive until Python's collector runs::

        Engine -- RequestSubmitter  creates and queues requests; RequestFactory reads their arguments
               -- EngineLoop        decides which thread steps; AsyncDriver steps for async readers
               -- HeadTraining      trains a draft head on the sequences of requests
               -- Shutdown          ends the other work when the engine is closed or deleted, and in a forked child
               -- AdapterTable      the loaded LoRA adapters
                   -- Scheduler     one step
                       -- PromptReader, TierChoice, Policies, HostCalls, Delivery, Retirement
                       -- TierTable, Batch, Slots, WaitingQueue, UnreadTokens

    Args:
        target: the wrapped model.
        arena: state of all slots.
        executables: executables of requests without special needs.
        build: builds the executables of another kind, when the first request needs them.
        build_mixed: builds the mixed tiers of a kind, when the first request whose tokens are watched is submitted.
        policy: chooses the draft length of each step.
        outcomes: results of each run, for the host.
        traits: requirements of the executables.
        options: options of the caller.
        host_draft: a drafter on the host, called before each step.
        saver: saves hidden states of sequences; None if they are not saved.
        adapters: the arena's buffers of adapters; None if it has none.
        ranks: ranks of a sharded model, which repeat this engine's runs.

    Attributes:
        prefix_reuse: whether ``slots`` reuse the KV of known prefixes.
    """

    def __init__(
        self,
        target: Target,
        arena: Arena,
        executables: Executables,
        build: Callable[[Kind], Executables],
        build_mixed: Callable[[Kind], Mapping[TierName, Tier]],
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
        # With a budget in tokens no step also processes a prompt.
        self.table = table = TierTable(executables, build, build_mixed if budget is None else lambda kind: {})
        self.stats = stats = Stats(arena.layout.max_draft_len)
        unread = None if table.catch_up is None else UnreadTokens(arena, table.catch_up, table.deepest + 1)
        self.batch, self.waiting = batch, waiting = Batch(arena, unread), WaitingQueue(options.max_waiting)
        # KV of a decode step and of a prompt chunk differ in their last bits.
        self.prefix_reuse = options.prefix_reuse and not traits.one_shape
        self.slots = slots = Slots(
            arena,
            target.state_of_weights,
            reuse=self.prefix_reuse,
            clear=traits.reads_dead_positions,
            state_checkpoints=options.state_checkpoints,
            prompts_differ=traits.prompts_differ,
            unread=unread,
            rereads=not (traits.one_shape or traits.prompts_differ),
        )
        # A longer chunk would skip checkpoints.
        widths = sorted({width for width, _ in table.prefill})
        if options.state_checkpoints is not None:
            widths = [width for width in widths if width <= options.state_checkpoints] or widths[:1]
        self.policies = policies = Policies(
            policy,
            table.draft_lens,
            ready=traits.ready,
            measure=lambda: measure_tiers(arena, table.tiers, undrafted=traits.network_on_demand),
        )
        self.retirement = retirement = Retirement(batch, slots, stats, saver, unread)
        delivery = Delivery(retirement, stats, arena.layout.max_len)
        self.host_calls = host_calls = HostCalls(
            arena, retirement, None if host_draft is None else HostDrafter(host_draft, arena)
        )
        # Both use one clock, so measurements arrive in the order of runs.
        clock = clock_of(arena.device)
        self.prompts = prompts = PromptReader(
            arena,
            table,
            batch,
            slots,
            waiting,
            retirement,
            delivery,
            host_calls,
            outcomes,
            stats,
            PrefillBudget(widths, budget, fixed=traits.one_shape, flat=device.flat_chunk),
            clock,
            unread,
        )
        self.choice = choice = TierChoice(arena, batch, table, policies, traits)
        # Results are read one step late only if the device runs beside the host, and if the next step does not depend
        # on them: on a draft of the host, on whether a network drafts, on its confidence, or on positions to clear.
        asks = traits.network_on_demand or "draft_confidence" in arena or host_draft is not None
        waits = asks or traits.reads_dead_positions
        self.scheduler = scheduler = Scheduler(
            arena,
            table,
            batch,
            slots,
            prompts,
            choice,
            policies,
            host_calls,
            delivery,
            retirement,
            outcomes,
            stats,
            clock,
            late=device.asynchronous and not waits,
            clears_rejected=traits.reads_dead_positions,
            drafter=SegmentedDrafter(arena, table, policies) if traits.segments else None,
            unread=unread,
        )
        self.loop = loop = EngineLoop(scheduler, waiting, slots, retirement, arena.device, saves=saver is not None)
        self.adapters = AdapterTable(adapters, arena, slots, waiting, loop)
        self._async_driver, self.training = AsyncDriver(loop), HeadTraining(arena, loop, retirement)
        self.submitter = RequestSubmitter(
            RequestFactory(target, arena, self.adapters, saver, traits),
            table,
            loop,
            slots,
            waiting,
            ranks,
            max_batch=arena.layout.max_batch,
            captured=traits.captured,
        )
        self._shutdown = Shutdown(loop, self._async_driver, self.training, ranks, saver)
        open_engines.add(self)
        if saver is not None:
            self._shutdown.write_when_dropped(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse ``copy`` and ``pickle``.

        Raises:
            CannotCopy: always.
        """
        raise CannotCopy()

    # --- parts and state -----------------------------------------------------------------------------

    @property
    def tiers(self) -> dict[TierName, Tier]:
        """Tiers by draft length, row count and kind."""
        return self.table.tiers

    @property
    def mixed_tiers(self) -> dict[TierName, Tier]:
        """Tiers that also process a part of a prompt."""
        return self.table.mixed_tiers

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of executables that requests may need, built or not."""
        return tuple(kind for kind in KINDS if kind != "drawn" or self.traits.drawn_options)

    @property
    def prefill_tiers(self) -> dict[tuple[int, ChunkKind], Tier]:
        """Executables of prompt chunks, by width and kind."""
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
        """Number of steps in a row, up to the newest one, that failed as a whole."""
        return self.scheduler.failures

    @property
    def closed(self) -> bool:
        """Whether the engine was closed."""
        return self.loop.closed

    @property
    def running(self) -> list[Request]:
        """Requests that own a slot."""
        return self.slots.owned

    @property
    def policy(self) -> AnyPolicy:
        """The policy that chooses the draft length of each step. It may be replaced at any time. The new one starts
        without history."""
        return self.policies.policy

    @policy.setter
    def policy(self, policy: AnyPolicy) -> None:
        self.policies.policy = policy

    # --- requests ------------------------------------------------------------------------------------

    def submit(
        self,
        ids: Sequence[int] | torch.Tensor,
        *,
        inputs: Mapping[str, Any] | Features | None = None,
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
        """Submit a request for the continuation of one prompt, and return it at once.

        Args:
            ids: token ids ``[P]`` or ``[1, P]``.
            inputs: what the model's forward accepts beside tokens, by name: of a vision-language model what its
                processor returns for this prompt (``pixel_values``, ``image_grid_thw``, ...). The model's own code
                embeds it before this method returns. For several requests with one prompt, give the result of
                :meth:`embed`.
            max_new_tokens: Most new tokens. None means the value of the model's generation_config (``max_new_tokens``,
                or ``max_length`` with the prompt), else 128. A request also ends at ``max_len``.
            eos_token_id: One or several ids that end a sequence. None means those of the model's generation_config.
            stop: One or several texts that end a sequence; they need ``tokenizer``. It ends with the token that
                completes one.
            stopping_criteria: transformers' ``StoppingCriteria``, one or several. They are called after each token with
                this request's ids ``[1, P + new]`` and ``None`` for scores.
            tokenizer: The tokenizer of the token ids. For ``stop``, ``Result.text`` and ``stream(text=True)``.
            streamer: A transformers streamer. Requests must not share one.
            do_sample: Whether tokens are drawn; otherwise the most likely one is chosen. None means the value of the
                generation_config.
            seed: Seed of what is drawn. 0 to 2**63 - 1; None draws a seed from torch's default generator. The same seed
                and options give the same text, with any drafts and with any other requests. A greedy request draws
                nothing: it may have a seed, as other requests of the same caller do, and its text does not depend on
                it.
            priority: Of two waiting requests, the one with the larger number goes first; in the server, as in vLLM, the
                smaller.
            num_draft_tokens: Most draft tokens of a step, 0 for none. None means as many as the tier has. The text does
                not depend on it.
            prediction: Token ids that the new text is expected to have; mode `prediction` drafts them. At most
                ``max_len`` of them. The text does not depend on it.
            logprobs: Whether to return the log-probability of each new token. In ``Result.logprobs``.
            prompt_logprobs: Whether to return the log-probability of each prompt token. In ``Result.prompt_logprobs``.
                The whole prompt is processed for them: KV of another sequence with the same beginning is not reused.
                ``Result.prompt_best`` has the likeliest token at each position, and ``Result.prompt_top_logprobs`` the
                likeliest ``top_logprobs`` ones, at most 20.
            top_logprobs: How many of the likeliest tokens to return at each new token, 0 for none. In
                ``Result.top_logprobs``; needs ``wrap(scores=True)``.
            output_logits: Whether to return the model's own logits, of each new token. In ``Result.logits``, of the
                whole vocabulary; needs ``wrap(scores=True)``.
            output_scores: Whether to return the scores after all processors, of each new token. In ``Result.scores``,
                of the whole vocabulary; needs ``wrap(scores=True)``.
            record: Whether hidden states are saved, where the wrap saves them, or the record's id. They are saved
                unless the request is cancelled or fails. The default id is a number after the files' prefix.
            adapter: The name of the LoRA adapter that the model has. One of ``spec.adapters``; None means the model
                without adapters.
            client: The client of the request; clients get slots in rotation. A list has the widest name first, as in
                ``["10.0.0.7", "chat 12"]``: the chats of one address get slots in rotation. The server names the API
                key or the address, and the HTTP request.
            options: options of the sampling pipeline, by transformers' names (:data:`speccompile.sampling.OPTIONS`):
                ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``, ``epsilon_cutoff``, ``eta_cutoff``
                (these with ``do_sample=True``), ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
                ``logit_bias``, ``sequence_bias``, ``remove_invalid_values``, ``renormalize_logits``,
                ``no_repeat_ngram_size``, ``bad_words_ids``, ``min_new_tokens``, ``min_length`` (with the prompt),
                ``forced_eos_token_id``, ``suppress_tokens``, ``begin_suppress_tokens``, ``guide`` (of
                :mod:`speccompile.guides`), ``prefix_allowed_tokens_fn``, ``logits_processor``,
                ``watermarking_config``. An option that is not given has the value of the generation_config.
                The last three are called on the host, once before each token, so this request has no drafts; other
                requests keep theirs. ``logits_processor`` is one of transformers' ``LogitsProcessor`` or a list of
                them, called with int64 ``[1, P + new]`` and float32 ``[1, V]``. It may have state of earlier tokens:
                requests must not share such a processor. A processor of exactly the type that transformers builds for
                an option replaces that option, as in transformers. Processors that only consist of tensor operations
                keep drafts if they are given to ``wrap(logits_processor=...)``.
                A slot holds at most 256 ids of ``logit_bias``, 256 of ``suppress_tokens``, 64 of
                ``begin_suppress_tokens``, 256 sequences with a bias and 64 bad words of up to 8 tokens, and n-grams of
                up to 16 tokens. More are refused.

        Raises:
            QueueFull: the queue is full, for all clients or for this one.
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
        return self.submitter.submit(self, ids, given, inputs)

    def embed(self, ids: Sequence[int] | torch.Tensor, inputs: Mapping[str, Any]) -> Features | None:
        """Embed the images of a prompt once, for several requests: ``submit(ids, inputs=engine.embed(ids, inputs))``.

        Args:
            ids: token ids ``[P]`` or ``[1, P]``.
            inputs: as in :meth:`submit`.

        Returns:
            The embeddings; None if the inputs have no images.

        Raises:
            UserError: the prompt or the inputs are not valid.
        """
        return self.submitter.embed(ids, inputs)

    def capacity(self) -> Capacity:
        """Return the current capacity. Another thread may change it at once."""
        return self.submitter.capacity()

    # --- stepping ------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether no request waits or runs, and no step is in progress."""
        return self.loop.idle

    def step(self) -> list[Request]:
        """Run one step: process waiting prompts within the budget, then run one tier over all rows. Return the requests
        that had a row.

        Raises:
            Closed, InsideStep.
        """
        return self.loop.step()

    def run(self) -> None:
        """Step until no request waits or runs."""
        self.loop.run()

    def serve(self) -> None:
        """Step until :meth:`close`, and sleep while no request waits or runs. It returns only then, so run it in a
        thread: ``threading.Thread(target=spec.engine.serve).start()``. Without such a thread, a thread that waits for a
        request steps.
        """
        self.loop.serve()

    def prepare(self, kind: Kind, *, watched: bool = False) -> None:
        """Build the executables of a kind, from any thread. For requests whose tokens are ``watched``, also build its
        mixed tiers. Other threads step meanwhile, unless the build itself runs the executables over the arena."""
        self.submitter.prepare(kind, watched=watched)

    # --- the driver of requests (speccompile.runtime.request.Driver) ---------------------------------

    def ended(self, request: Request) -> None:
        """Retire ``request``, which has ended."""
        self.loop.ended(request)

    def abandoned(self, request: Request) -> None:
        """Cancel ``request``, which has no reader any more."""
        self.loop.abandoned(request)

    def wait(self, request: Request, seen: int, timeout: float | None = None) -> None:
        """Run steps until ``request`` has more than ``seen`` new tokens or has ended, or ``timeout`` seconds have
        passed."""

        def done() -> bool:
            return request.finished or len(request.new_tokens) > seen

        if not done():
            self.loop.step_or_wait(done, timeout)

    async def wait_async(self, request: Request, seen: int) -> None:
        """Wait until ``request`` has more than ``seen`` new tokens or has ended; the event loop is not blocked."""
        await self._async_driver.wait(request, seen)

    # --- the end -------------------------------------------------------------------------------------

    def close(self) -> None:
        """Cancel all requests, accept no more, and write the pending records.

        Raises:
            RecordsNotWritten: pending records cannot be written.
        """
        self._shutdown.close()

    def after_fork(self) -> None:
        """Adapt the engine to a forked child."""
        self._shutdown.after_fork()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

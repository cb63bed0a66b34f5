"""The parts of an engine and their connections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from speccompile.adapters.buffers import AdapterBuffers
from speccompile.graph.arena import Arena
from speccompile.graph.keys import Kind, TierName
from speccompile.lowering.tier import Executables, Tier
from speccompile.modes.base import HostDraft
from speccompile.policies.base import AnyPolicy
from speccompile.ranks.ranks import Ranks
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.async_driver import AsyncDriver
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.host_calls import HostCalls
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.learning import HeadTraining
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.options import EngineOptions, StepTraits
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.prompt_reader import PromptReader
from speccompile.runtime.request_factory import RequestFactory
from speccompile.runtime.request_submitter import RequestSubmitter
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.saver import Saver
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.segmented_drafter import SegmentedDrafter
from speccompile.runtime.shutdown import Shutdown
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.target import Target
from speccompile.runtime.tier_choice import TierChoice
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.timing import clock_of
from speccompile.runtime.waiting import WaitingQueue
from speccompile.utils.devices import traits_of


@dataclass(frozen=True)
class EngineParts:
    """The connected parts. No part refers to the engine, which would keep tensors alive until Python's collector runs.

    Attributes:
        prefix_reuse: whether ``slots`` reuse the KV of known prefixes.
    """

    arena: Arena
    traits: StepTraits
    options: EngineOptions
    saver: Saver | None
    ranks: Ranks | None
    stats: Stats
    prefix_reuse: bool
    table: TierTable
    batch: Batch
    waiting: WaitingQueue
    slots: Slots
    policies: Policies
    prompts: PromptReader
    choice: TierChoice
    scheduler: Scheduler
    loop: EngineLoop
    adapters: AdapterTable
    submitter: RequestSubmitter
    training: HeadTraining
    async_driver: AsyncDriver
    shutdown: Shutdown


def _no_mixed_tiers(kind: Kind) -> Mapping[TierName, Tier]:
    """Return no tiers: with a budget in tokens no step also processes a prompt."""
    return {}


def connect_parts(
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
) -> EngineParts:
    """Create the parts of an :class:`~speccompile.runtime.engine.Engine`.

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
    """
    device = traits_of(arena.device)
    budget = device.prefill_budget if options.prefill_budget is None else options.prefill_budget
    table = TierTable(executables, build, build_mixed if budget is None else _no_mixed_tiers)
    stats, batch, waiting = Stats(arena.layout.max_draft_len), Batch(arena), WaitingQueue(options.max_waiting)
    # KV of a decode step and of a prompt chunk differ in their last bits.
    prefix_reuse = options.prefix_reuse and not traits.one_shape
    slots = Slots(
        arena,
        target.state_of_weights,
        reuse=prefix_reuse,
        clear=traits.reads_dead_places,
        state_checkpoints=options.state_checkpoints,
        prompts_differ=traits.prompts_differ,
    )
    # A longer chunk would skip checkpoints.
    widths = sorted({width for width, _ in table.prefill})
    if options.state_checkpoints is not None:
        widths = [width for width in widths if width <= options.state_checkpoints] or widths[:1]
    policies = Policies(
        policy,
        table.draft_lens,
        ready=traits.ready,
        measure=lambda: measure_tiers(arena, table.tiers, undrafted=traits.network_on_demand),
    )
    retirement = Retirement(batch, slots, stats, saver)
    delivery = Delivery(retirement, stats, arena.layout.max_len)
    host_calls = HostCalls(arena, retirement, None if host_draft is None else HostDrafter(host_draft, arena))
    # Both use one clock, so measurements arrive in the order of runs.
    clock = clock_of(arena.device)
    prompts = PromptReader(
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
    )
    choice = TierChoice(arena, batch, table, policies, traits)
    # Results are read one step late only if the device runs beside the host, and if the next step does not depend on
    # them: on a draft of the host, on whether a network drafts, on its confidence, or on positions to be cleared.
    asks = traits.network_on_demand or "draft_confidence" in arena or host_draft is not None
    waits = asks or traits.reads_dead_places
    scheduler = Scheduler(
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
        clears_rejected=traits.reads_dead_places,
        drafter=SegmentedDrafter(arena, table, policies) if traits.segments else None,
    )
    loop = EngineLoop(scheduler, waiting, slots, retirement, arena.device, saves=saver is not None)
    adapter_table = AdapterTable(adapters, arena, slots, waiting, loop)
    async_driver, training = AsyncDriver(loop), HeadTraining(arena, loop, retirement)
    submitter = RequestSubmitter(
        RequestFactory(target, arena, adapter_table, saver, drawn_options=traits.drawn_options),
        table,
        loop,
        slots,
        waiting,
        ranks,
        max_batch=arena.layout.max_batch,
        captured=traits.captured,
    )
    return EngineParts(
        arena=arena,
        traits=traits,
        options=options,
        saver=saver,
        ranks=ranks,
        stats=stats,
        prefix_reuse=prefix_reuse,
        table=table,
        batch=batch,
        waiting=waiting,
        slots=slots,
        policies=policies,
        prompts=prompts,
        choice=choice,
        scheduler=scheduler,
        loop=loop,
        adapters=adapter_table,
        submitter=submitter,
        training=training,
        async_driver=async_driver,
        shutdown=Shutdown(loop, async_driver, training, ranks, saver),
    )

"""The parts of an engine, and how they are connected."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.adapters.buffers import AdapterBuffers
from speccompile.graph.arena import Arena
from speccompile.modes.base import HostDraft
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.adapter_table import AdapterTable
from speccompile.runtime.batch import Batch
from speccompile.runtime.delivery import Delivery
from speccompile.runtime.departures import Departures
from speccompile.runtime.host_answers import HostAnswers
from speccompile.runtime.host_drafter import HostDrafter
from speccompile.runtime.measure import measure_tiers
from speccompile.runtime.options import EngineOptions, StepTraits
from speccompile.runtime.outcomes import Outcomes
from speccompile.runtime.policy_controller import Policies
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.prompt_reader import PromptReader
from speccompile.runtime.saver import Saver
from speccompile.runtime.scheduler import Scheduler
from speccompile.runtime.segmented_drafter import SegmentedDrafter
from speccompile.runtime.slots import Slots
from speccompile.runtime.stats import Stats
from speccompile.runtime.target import Target
from speccompile.runtime.tier_choice import TierChoice
from speccompile.runtime.tier_table import TierTable
from speccompile.runtime.timing import clock_of
from speccompile.runtime.turns import Turns
from speccompile.runtime.waiting import WaitingQueue
from speccompile.utils.devices import traits_of


@dataclass(frozen=True)
class EngineParts:
    """The connected parts. None of them refers to the engine: it would keep its tensors until Python's collector runs.

    Attributes:
        prefix_reuse: whether ``slots`` reuse the KV of known prefixes.
    """

    table: TierTable
    batch: Batch
    waiting: WaitingQueue
    slots: Slots
    policies: Policies
    prompts: PromptReader
    choice: TierChoice
    scheduler: Scheduler
    turns: Turns
    stats: Stats
    departures: Departures
    prefix_reuse: bool
    adapters: AdapterTable


def connect_parts(
    target: Target,
    arena: Arena,
    table: TierTable,
    policy: AnyPolicy,
    outcomes: Outcomes,
    *,
    traits: StepTraits,
    options: EngineOptions,
    host_draft: HostDraft | None,
    saver: Saver | None,
    adapters: AdapterBuffers | None,
) -> EngineParts:
    """Create the parts of an engine. Arguments as of :class:`~speccompile.runtime.engine.Engine`."""
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
    # A longer chunk would pass over checkpoints.
    widths = sorted({width for width, _ in table.prefill})
    if options.state_checkpoints is not None:
        widths = [width for width in widths if width <= options.state_checkpoints] or widths[:1]
    policies = Policies(
        policy,
        table.draft_lens,
        ready=traits.ready,
        measure=lambda: measure_tiers(arena, table.tiers, undrafted=traits.network_on_demand),
    )
    departures = Departures(batch, slots, stats, saver)
    delivery = Delivery(departures, stats, arena.layout.max_len)
    answers = HostAnswers(arena, departures, None if host_draft is None else HostDrafter(host_draft, arena))
    # One clock for both, so that measurements arrive in the order of runs.
    clock = clock_of(arena.device)
    prompts = PromptReader(
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
        PrefillBudget(widths, options.prefill_budget, fixed=traits.one_shape),
        clock,
    )
    choice = TierChoice(arena, batch, table, policies, traits)
    # Results are read late only where the device runs beside the host, and where nothing of a step decides which tier
    # comes next, or has to be cleared before it.
    chosen_by = (traits.ready and "draft_lens" in arena) or "draft_confidence" in arena
    waits = chosen_by or traits.reads_dead_places or host_draft is not None
    scheduler = Scheduler(
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
        late=traits_of(arena.device).asynchronous and not waits,
        clears_rejected=traits.reads_dead_places,
        drafter=SegmentedDrafter(arena, table, policies) if traits.segments else None,
    )
    turns = Turns(scheduler, waiting, slots, departures, arena.device, saves=saver is not None)
    return EngineParts(
        table,
        batch,
        waiting,
        slots,
        policies,
        prompts,
        choice,
        scheduler,
        turns,
        stats,
        departures,
        prefix_reuse,
        AdapterTable(adapters, arena, slots, waiting, turns),
    )

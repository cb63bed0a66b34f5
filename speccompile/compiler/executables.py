"""Executables of a wrap: finished steps, loaded by the backend and bound to weights and arena, kind by kind."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace

from speccompile.compiler.config import BuildConfig
from speccompile.compiler.layout import prefill_widths
from speccompile.compiler.memory import LESS
from speccompile.compiler.pipelines import catch_up_kinds, drafter_pipeline, step_pipeline
from speccompile.compiler.step_store import StepMaker
from speccompile.graph.arena import Arena
from speccompile.graph.finished import FinishedStep
from speccompile.graph.keys import Kind, PrefillName, TierKey, TierName
from speccompile.graph.step_form import StepForm
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.backends import load
from speccompile.lowering.cuda.captures import Captures
from speccompile.lowering.pooled import runs_on_ours
from speccompile.lowering.recorded_step import MOST_TOKENS, RecordableStep, StepMemory
from speccompile.lowering.tier import Executables, Tier, bind, in_segments
from speccompile.utils.build_lock import one_build
from speccompile.utils.device_memory import memory_errors
from speccompile.utils.progress import listener, listening, task

TierSteps = dict[TierName, FinishedStep]
PrefillSteps = dict[PrefillName, FinishedStep]


def steps_of_kind(config: BuildConfig, maker: StepMaker, kind: Kind) -> tuple[TierSteps, PrefillSteps]:
    """Finished steps of every tier and prompt chunk of a kind."""
    tiers: TierSteps = {}
    for draft_len, rows in itertools.product(config.tiers, config.row_counts):
        form = config.form(draft_len, rows, kind)
        drafter = drafter_pipeline(config, form)
        step = maker.finish(step_pipeline(config, form))
        tiers[draft_len, rows, kind] = replace(step, drafter=None if drafter is None else maker.finish(drafter))
    widths = prefill_widths(config.max_len)
    chunks: list[PrefillName] = [(width, kind) for width in widths]
    if kind == config.kind:
        # Inner chunks choose no token, so all kinds share them. Another chunk follows, so none can fill a slot.
        chunks += [(width, "inner") for width in widths if width < config.max_len - 1]
        chunks += [(config.catches_up, own) for own in catch_up_kinds(config)]
    elif kind == "scored":
        chunks += [(width, "prompt_scored") for width in widths]
    prefill = {
        (width, own): maker.finish(step_pipeline(config, config.form(kind=own, chunk=width))) for width, own in chunks
    }
    return tiers, prefill


class ExecutableMaker:
    """Builds executables over one arena, those of a kind at its first use.

    Args:
        outlined: the model that all steps start from.
        captures: captures them as CUDA graphs; None leaves them as they are.
    """

    def __init__(
        self, config: BuildConfig, arena: Arena, outlined: StepGraph, steps: StepMaker, captures: Captures | None
    ) -> None:
        self._config = config
        self._arena = arena
        self._outlined = outlined
        self._steps = steps
        self._captures = captures
        #: Memory of the recorded steps: an engine runs one at a time.
        self.step_memory = StepMemory()
        # Kinds that are built later, in other threads, report to the listener of this thread.
        self._listener = listener()
        self._mixed: dict[Kind, Mapping[TierName, Tier]] = {}
        self._pooled = config.kernels.native and runs_on_ours(outlined)

    @one_build()
    def of_kind(self, kind: Kind) -> Executables:
        """Tiers and prompt chunks of a kind. Raises as :meth:`of_steps`."""
        with self._memory_named(kind), self._listening(), task(f"build the {kind} steps"):
            return self.of_steps(*steps_of_kind(self._config, self._steps, kind))

    def of_steps(self, tiers: TierSteps, prefill: PrefillSteps) -> Executables:
        """Store these steps, and bind them to the arena.

        Raises:
            LoweringError: with CUDA graphs, a step cannot be captured.
        """
        steps = [*tiers.values(), *prefill.values()]
        widest = max((step.width for step in tiers.values()), default=0)
        self._steps.store([*steps, *(step.drafter for step in steps if step.drafter is not None)])
        executables = self._captured(
            Executables(
                {
                    (draft_len, rows, kind): self._bound(
                        StepForm(draft_len, rows, kind).name,
                        TierKey(rows, step.width, kind),
                        draft_len,
                        step,
                        rows * widest,
                    )
                    for (draft_len, rows, kind), step in tiers.items()
                },
                {
                    (width, kind): self._bound(StepForm(0, 1, kind, chunk=width).name, TierKey(1, width, kind), 0, step)
                    for (width, kind), step in prefill.items()
                },
            )
        )
        executables = self._on_all_ranks(executables)
        if self._config.drafts_in_segments:
            executables = replace(executables, tiers=in_segments(executables.tiers))
        return executables

    @one_build()
    def mixed(self, kind: Kind) -> Mapping[TierName, Tier]:
        """Mixed tiers of a kind, built at the first call; empty if decode steps cannot process prompts. Raises as
        :meth:`of_steps`."""
        if kind not in self._mixed:
            self._mixed[kind] = self._make_mixed(kind) if self._config.mixes else {}
        return self._mixed[kind]

    def _make_mixed(self, kind: Kind) -> Mapping[TierName, Tier]:
        config, tiers = self._config, {}
        with self._memory_named(kind), self._listening(), task(f"build the mixed {kind} steps"):
            for draft_len, rows in itertools.product(config.chains, config.mixed_row_counts):
                form = config.form(draft_len, rows, kind, prompt_rows=config.prompt_rows(draft_len))
                step = self._steps.finish(step_pipeline(config, form))
                self._steps.store([step])
                key = TierKey(rows, step.width, kind, form.prompt_rows * step.width)
                tiers[draft_len, rows, kind] = self._bound(form.name, key, draft_len, step)
            return self._on_all_ranks(self._captured(Executables(tiers, {}))).tiers

    def _memory_named(self, kind: Kind) -> AbstractContextManager[None]:
        known = {"state": self._arena.nbytes}
        return memory_errors(self._arena.device, f"the {kind} steps", advice=LESS, known=known)

    def _listening(self) -> AbstractContextManager[None]:
        return listening(listener() or self._listener)

    def _captured(self, executables: Executables) -> Executables:
        return executables if self._captures is None else self._captures.of(executables)

    def _on_all_ranks(self, executables: Executables) -> Executables:
        ranks = self._config.ranks
        if ranks is None:
            return executables
        return Executables(
            {name: ranks.shared(tier) for name, tier in executables.tiers.items()},
            {name: ranks.shared(tier) for name, tier in executables.prefill.items()},
        )

    def _bound(self, name: str, key: TierKey, draft_len: int, step: FinishedStep, pool_tokens: int = 0) -> Tier:
        pool_tokens = pool_tokens or key.tokens + key.prompt_tokens
        arena = self._arena
        executable = load(self._config.backend, step.source, self._outlined, name)
        drafter = None
        if step.drafter is not None:
            drafter = self._bound(f"drafter of {name}", key, draft_len, step.drafter, pool_tokens)
        arguments = bind(step.ports, arena)
        if isinstance(executable, RecordableStep) and self._config.ranks is None and pool_tokens <= MOST_TOKENS:
            executable = executable.bound(arguments, pool_tokens if self._pooled else None, self.step_memory)
        tier = Tier(name, key, draft_len, step, executable, arguments, arena, drafter, self._pooled, pool_tokens)
        arena.record_call(name, tier.argument_names, tier.arguments)
        return tier

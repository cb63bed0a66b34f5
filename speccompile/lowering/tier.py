"""A tier: the executable of one key, bound to its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from speccompile.graph.arena import Arena
from speccompile.graph.finished import FinishedStep
from speccompile.graph.keys import Kind, PrefillName, TierKey, TierName
from speccompile.graph.port import Port
from speccompile.graph.stage import Stages
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.recorded_step import RecordedStep
from speccompile.utils.workers import in_pool


@dataclass(frozen=True)
class Tier:
    """One immutable executable. It reads and writes weights and arena tensors and returns nothing.

    Args:
        draft_len: K.
        arguments: the tensors that are passed to every run.
        drafter: a split drafter, which runs before the tier. A drafter may have one, too, which it continues.
        pooled: the C++ ops do all slow work of the tier, and may do it in their own pool of threads.
        pool_tokens: tokens that decide whether they use the pool. All draft lengths with the same number of rows have
            the number of the longest: a change of the draft length must not end OpenMP's threads and start them again.
    """

    name: str
    key: TierKey
    draft_len: int
    step: FinishedStep = field(repr=False)
    executable: Callable[..., Any] = field(repr=False)
    arguments: tuple[torch.Tensor, ...] = field(repr=False)
    arena: Arena = field(repr=False)
    drafter: Tier | None = field(default=None, repr=False)
    pooled: bool = False
    pool_tokens: int = 0

    @property
    def stages(self) -> Stages:
        """The stages of the step, by name of the pass."""
        return self.step.stages

    @property
    def graph(self) -> StepGraph:
        """The graph of the last stage."""
        return self.stages.last.graph

    @property
    def ports(self) -> tuple[Port, ...]:
        """Ports of the arguments."""
        return self.step.ports

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.ports)

    @property
    def segments(self) -> tuple[Tier, ...]:
        """The drafters that run before the tier, in this order."""
        return () if self.drafter is None else (*self.drafter.segments, self.drafter)

    def run(self) -> None:
        """Run one step, drafters included."""
        if self.drafter is not None:
            self.drafter.run()
        self.run_target()

    def run_target(self) -> None:
        """Run the tier without its drafters: one step for rows that already have drafts."""
        self.arena.record_call(self.name, self.argument_names, self.arguments)
        if isinstance(self.executable, RecordedStep) and self.executable.replay():
            return
        # A caller's autocast would change the dtypes that the step was built for.
        threads = in_pool(self.pool_tokens) if self.pooled else contextlib.nullcontext()
        with torch.no_grad(), torch.autocast(self.arena.device.type, enabled=False), threads:
            self.executable(*self.arguments)


@dataclass(frozen=True)
class Executables:
    """Tiers by draft length, rows and kind, and prefill chunks by width and kind."""

    tiers: Mapping[TierName, Tier]
    prefill: Mapping[PrefillName, Tier]


def in_segments(tiers: Mapping[TierName, Tier]) -> dict[TierName, Tier]:
    """Return the tiers with linked drafters: the drafter of each continues that of the next smaller tier with the same
    rows and kind."""
    newest: dict[tuple[int, Kind], Tier] = {}
    linked = {}
    for (draft_len, rows, kind), tier in sorted(tiers.items()):
        drafter = tier.drafter
        if drafter is not None:
            drafter = newest[rows, kind] = replace(drafter, drafter=newest.get((rows, kind)))
        linked[draft_len, rows, kind] = replace(tier, drafter=drafter)
    return linked


def bind(ports: Iterable[Port], arena: Arena) -> tuple[torch.Tensor, ...]:
    """Return the tensors of a finished step's placeholders: the model's own weights, the rest from the arena."""
    return tuple(arena[port.name] if port.value is None else port.value for port in ports)

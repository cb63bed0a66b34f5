"""A tier: what runs for one key, bound to its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import torch

from speccompile.graph_capture.graph import Port, StepGraph
from speccompile.lowering.workers import in_pool
from speccompile.passes.finished import FinishedStep
from speccompile.passes.pipeline import Stages
from speccompile.runtime.arena import Arena

#: ``greedy``; ``sampled``, with the whole pipeline; ``scored``, which also records what tokens were chosen from.
Kind = Literal["greedy", "sampled", "scored"]
#: Each one serves what those in front of it serve.
KINDS: tuple[Kind, ...] = ("greedy", "sampled", "scored")
#: A prompt's last chunk chooses a token, as a step of that kind does; those in front of it are ``inner`` ones.
#: ``prompt_scored`` ones, whichever they are, are ``scored`` and record the prompt's own log-probabilities besides.
ChunkKind = Kind | Literal["inner", "prompt_scored"]
#: Of a tier: draft length, rows, kind. Of a prefill chunk: width, kind.
TierName = tuple[int, int, Kind]
PrefillName = tuple[int, ChunkKind]


@dataclass(frozen=True)
class TierKey:
    """Rows B, verify width T, the kind of step or of prompt chunk, and how many tokens of a prompt a mixed step reads
    along."""

    rows: int
    width: int
    sampling: ChunkKind = "greedy"
    prompt_tokens: int = 0

    @property
    def tokens(self) -> int:
        """That the target reads in one run."""
        return self.rows * self.width


@dataclass(frozen=True)
class Tier:
    """One immutable executable. It reads and writes weights and arena tensors and returns nothing.

    ``draft_len`` is K; ``arguments`` are the tensors that every run is called with; a split ``drafter`` runs in front.
    ``pooled``: the C++ ops do all of its work worth sharing out, and may do so in their own pool of threads.
    ``pool_tokens`` decide whether they do. All draft lengths of a number of rows have those of the longest: a switch
    of the draft length must not end OpenMP's threads and start them again.
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
        return self.step.stages

    @property
    def graph(self) -> StepGraph:
        return self.stages.last.graph

    @property
    def ports(self) -> tuple[Port, ...]:
        """Of the arguments."""
        return self.step.ports

    @cached_property
    def argument_names(self) -> tuple[str, ...]:
        return tuple(port.name for port in self.ports)

    def run(self) -> None:
        """One step."""
        if self.drafter is not None:
            self.drafter.run()
        self.arena.record_call(self.name, self.argument_names, self.arguments)
        # A caller's autocast would change the dtypes that the step was built for.
        threads = in_pool(self.pool_tokens) if self.pooled else contextlib.nullcontext()
        with torch.no_grad(), torch.autocast(self.arena.device.type, enabled=False), threads:
            self.executable(*self.arguments)


@dataclass(frozen=True)
class Executables:
    """Tiers by draft length, rows and kind, and prefill chunks by width and kind."""

    tiers: Mapping[TierName, Tier]
    prefill: Mapping[PrefillName, Tier]


def bind(ports: Iterable[Port], arena: Arena) -> tuple[torch.Tensor, ...]:
    """Tensors of a finished step's placeholders: the model's own weights, the rest from the arena."""
    return tuple(arena[port.name] if port.value is None else port.value for port in ports)

"""Training while requests are served: what it is given, and how new weights come into use."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn
from transformers import PreTrainedModel

from speccompile.graph.arena import Arena
from speccompile.hidden_states.options import SavedRows
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.engine_loop import EngineLoop
from speccompile.runtime.request import Request
from speccompile.runtime.retirement import Retirement
from speccompile.runtime.target import Target

#: Finish reasons of texts that are learnt from: what was decoded up to there is the target's.
LEARNT = ("eos", "stop", "max_new_tokens", "max_len", "cancelled")


@dataclass(frozen=True)
class ServedText:
    """A sequence that was decoded, up to its newest token, which the target has not read.

    Args:
        input_ids: int64 ``[n]``.
        loss_mask: bool ``[n]``, tokens that the target wrote.
        tapped: ``[n, taps * M]``, what the head reads.
        final: ``[n, M]``, what the target's lm_head reads.
        choices: int64 ``[n]``, the target's likeliest token after each position; None if they are not known yet.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    tapped: torch.Tensor
    final: torch.Tensor
    choices: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class TrainableHead:
    """What is trained.

    Args:
        head: that drafts. Its parameters are changed by ``adopt`` alone.
        target: whose texts it learns from.
        adopt: copies new values of some of the head's parameters, by name, into place between two steps.
        idle: whether no request runs or waits.
    """

    head: nn.Module
    target: PreTrainedModel
    adopt: Callable[[Mapping[str, torch.Tensor]], None]
    idle: Callable[[], bool]


class Learner(Protocol):
    """Trains a head while requests are served. Its methods may be called in any thread."""

    def collect(self, text: ServedText) -> None:
        """Learn from this text, some time. Called within a step, so it takes no time."""

    def learn(self, steps: int) -> Any:
        """Train so many steps now, and use the result if it is better. Returns what came of it."""

    def save(self, folder: str | Path) -> None:
        """Write the head that drafts now as a checkpoint."""

    def close(self, *, wait: bool) -> None:
        """Train no more. With ``wait`` none of its threads runs afterwards."""


@runtime_checkable
class Learning(Protocol):
    """The option ``learn`` of ``wrap``."""

    def start(self, trainable: TrainableHead) -> Learner:
        """Begin to train."""


class Collector:
    """Hands the texts of requests that have ended to a learner, which refers to the engine's parts, and is not kept.

    Args:
        rows: the hidden states that a step writes into ``arena`` for each position.
    """

    def __init__(self, learner: Learner, rows: SavedRows, arena: Arena) -> None:
        self._learner = weakref.ref(learner)
        self._rows = rows
        self._arena = arena

    def end(self, request: Request) -> None:
        """Called once for ``request``, which has ended and still has its slot."""
        learner, prompt, new = self._learner(), request.prompt, request.new_tokens
        if learner is None or request.finish_reason not in LEARNT or not new:
            return
        count = len(prompt) + len(new) - 1
        rows = self._arena[SavedRows.STATE][request.slot, :count].clone()
        final, tapped = self._rows.split(rows)
        ids = torch.tensor([*prompt, *new][:count], dtype=torch.int64, device=rows.device)
        mask = torch.arange(count, device=rows.device) >= len(prompt)
        learner.collect(ServedText(ids, mask, tapped, final))


class WeightUpdate:
    """Copies new weights into a head's tensors, and into the packed copies that executables read.

    Args:
        packs: of the head's weights.
    """

    def __init__(self, head: nn.Module, packs: WeightPacks, target: Target, loop: EngineLoop) -> None:
        self._parameters = dict(head.named_parameters())
        self._packs, self._target, self._loop = packs, target, loop

    def __call__(self, values: Mapping[str, torch.Tensor]) -> None:
        """Take ``values``, by name of the parameter. All that takes time is done before the turn."""
        pairs = []
        for name, value in values.items():
            old = self._parameters[name].detach()
            new = value.to(old.device, old.dtype)
            pairs += [(old, new), *self._packs.repacked(old, new)]

        def copy() -> None:
            for old, new in pairs:
                old.copy_(new)

        with self._loop.exclusive():
            self._target.change_drafter(copy)


class HeadTraining:
    """The training of a draft head while an engine serves.

    Attributes:
        learner: trains the head; None if nothing does.
    """

    def __init__(self, arena: Arena, loop: EngineLoop, retirement: Retirement) -> None:
        self._arena = arena
        self._loop = loop
        self._retirement = retirement
        self.learner: Learner | None = None

    def start(self, learning: Learning, head: nn.Module, packs: WeightPacks, rows: SavedRows, target: Target) -> None:
        """Let ``learning`` train ``head``, whose executables read ``packs``, from the texts of requests to come.

        Args:
            rows: what steps keep of each position.
        """
        adopt, loop = WeightUpdate(head, packs, target, self._loop), self._loop
        self.learner = learner = learning.start(TrainableHead(head, target.model, adopt, lambda: loop.idle))
        self._retirement.keeper = Collector(learner, rows, self._arena)

    def close(self) -> None:
        """Train no more."""
        if self.learner is not None:
            # In a callback its thread may wait for the current step.
            self.learner.close(wait=not self._loop.holds_lock)

    def after_fork(self) -> None:
        """In a forked child. The learner's thread is the parent's."""
        if self.learner is not None:
            self.learner = self._retirement.keeper = None

"""Training while requests are served: its inputs, and the update of weights."""

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

#: Finish reasons of sequences that are learnt from. Their tokens are the target's.
LEARNT = ("eos", "stop", "max_new_tokens", "max_len", "cancelled")


@dataclass(frozen=True)
class ServedText:
    """A decoded sequence without its newest token, which the target has not processed.

    Args:
        input_ids: int64 ``[n]``.
        loss_mask: bool ``[n]``, true at tokens that the target generated.
        tapped: ``[n, taps * M]``, the inputs of the head.
        final: ``[n, M]``, the inputs of the target's lm_head.
        choices: int64 ``[n]``, the target's likeliest token after each position; None if it is not known yet.
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
    """The head that is trained, and functions of the engine for its training.

    Args:
        head: the draft head. Only ``adopt`` changes its parameters.
        taps: the target's layers whose outputs the head reads.
        target: the model whose sequences the head learns from.
        adopt: copies new values of some of the head's parameters, by name, between two steps.
        idle: whether no request runs or waits.
    """

    head: nn.Module
    taps: tuple[int, ...]
    target: PreTrainedModel
    adopt: Callable[[Mapping[str, torch.Tensor]], None]
    idle: Callable[[], bool]


class Learner(Protocol):
    """Trains a head while requests are served. Any thread may call its methods."""

    def collect(self, text: ServedText) -> None:
        """Add a sequence to learn from later. This is called within a step, so it must be fast."""

    def learn(self, steps: int) -> Any:
        """Train ``steps`` steps now, and use the result if it is better. Return a description of the result."""

    def save(self, folder: str | Path) -> None:
        """Write the current head as a checkpoint."""

    def close(self, *, wait: bool) -> None:
        """End the training. With ``wait`` none of its threads runs afterwards."""


@runtime_checkable
class Learning(Protocol):
    """The type of the option ``learn`` of ``wrap``."""

    def start(self, trainable: TrainableHead) -> Learner:
        """Begin to train the head."""


class Collector:
    """Passes the sequences of ended requests to a learner. The reference to the learner is weak, since the learner
    refers to the engine's parts.

    Args:
        rows: the hidden states that a step writes into ``arena`` for each position.
    """

    def __init__(self, learner: Learner, rows: SavedRows, arena: Arena) -> None:
        self._learner = weakref.ref(learner)
        self._rows = rows
        self._arena = arena

    def end(self, request: Request) -> None:
        """Collect the sequence of ``request``, which has ended and still has its slot. Called once."""
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
        packs: packs of the head's weights.
    """

    def __init__(self, head: nn.Module, packs: WeightPacks, target: Target, loop: EngineLoop) -> None:
        self._parameters = dict(head.named_parameters())
        self._packs, self._target, self._loop = packs, target, loop

    def __call__(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy ``values``, by name of the parameter. Slow work is done before the engine's lock is acquired."""
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
        learner: trains the head; None without training.
    """

    def __init__(self, arena: Arena, loop: EngineLoop, retirement: Retirement) -> None:
        self._arena = arena
        self._loop = loop
        self._retirement = retirement
        self.learner: Learner | None = None

    def start(self, learning: Learning, head: nn.Module, packs: WeightPacks, rows: SavedRows, target: Target) -> None:
        """Let ``learning`` train ``head``, whose executables read ``packs``, on the sequences of later requests.

        Args:
            rows: the hidden states that steps store for each position.
        """
        adopt, loop = WeightUpdate(head, packs, target, self._loop), self._loop
        self.learner = learner = learning.start(
            TrainableHead(head, rows.layers, target.model, adopt, lambda: loop.idle)
        )
        self._retirement.keeper = Collector(learner, rows, self._arena)

    def close(self) -> None:
        """End the training."""
        if self.learner is not None:
            # In a callback the learner's thread may wait for the current step.
            self.learner.close(wait=not self._loop.holds_lock)

    def after_fork(self) -> None:
        """Adapt to a forked child. The learner's thread only exists in the parent."""
        if self.learner is not None:
            self.learner = self._retirement.keeper = None

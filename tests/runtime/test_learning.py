"""The training beside an engine ends with it, and belongs to the process that began it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from speccompile.hidden_states.options import SavedRows
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.runtime.learning import Collector, HeadTraining, TrainableHead
from speccompile.runtime.target import Target
from speccompile.utils.weight_forms import WeightForms
from support.loop_parts import TurnParts
from support.tiny import tiny_llama


class Learner:
    """Stands in for what trains: whether each ``close`` waited."""

    def __init__(self) -> None:
        self.closed: list[bool] = []

    def collect(self, text: object) -> None: ...

    def learn(self, steps: int) -> Any: ...

    def save(self, folder: str | Path) -> None: ...

    def close(self, *, wait: bool) -> None:
        self.closed.append(wait)


class Learning:
    """The option: starts that learner."""

    def __init__(self) -> None:
        self.learner = Learner()

    def start(self, trainable: TrainableHead) -> Learner:
        self.trainable = trainable
        return self.learner


class Bench:
    """Training of a linear layer over turns that a test makes."""

    def __init__(self) -> None:
        self.parts, self.learning = TurnParts(), Learning()
        self.training = HeadTraining(self.parts.arena, self.parts.loop, self.parts.retirement)

    def start(self) -> None:
        target, head = cast(Target, _Target()), nn.Linear(2, 2)
        rows = SavedRows((0,), 8, torch.float32)
        self.training.start(self.learning, head, WeightPacks(WeightForms()), rows, target)


class _Target:
    model = tiny_llama()


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_without_a_learner_there_is_nothing_to_end(bench: Bench) -> None:
    bench.training.close()
    bench.training.after_fork()
    assert bench.training.learner is None and bench.parts.retirement.keeper is None


def test_a_forked_child_has_no_learner_and_collects_nothing(bench: Bench) -> None:
    bench.start()
    assert isinstance(bench.parts.retirement.keeper, Collector)
    bench.training.after_fork()
    bench.training.close()
    assert bench.training.learner is None and bench.parts.retirement.keeper is None
    assert bench.learning.learner.closed == []


def test_it_is_idle_when_no_request_runs_or_waits(bench: Bench) -> None:
    bench.start()
    assert bench.learning.trainable.idle()
    bench.parts.running()
    assert not bench.learning.trainable.idle()

"""A training that is stopped, killed, diverged or out of disk space continues to the weights of one in one go."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile.errors import (
    TrainingDiverged,
    TrainingNotSaved,
)
from speccompile.training import TrainedHead, train_head
from speccompile.training.unrolled import UnrolledTraining
from support.errors import raises
from support.training_data import greedy_texts, learnable, quick, same_weights, write_texts

#: Of trainings with few texts: a few steps have to change what a head accepts.
FEW: dict[str, Any] = {"eval_every": 3, "learning_rate": 5e-2}


@pytest.fixture(scope="module")
def few_texts(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps of each epoch: for trainings that are stopped and continued."""
    return write_texts(tmp_path_factory.mktemp("few"), model, greedy_texts(model, 88))


@pytest.fixture(scope="module")
def one_epoch(model: LlamaForCausalLM, few_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    """Never stopped: what those that were are compared with."""
    return train_head(model, few_texts, tmp_path_factory.mktemp("one"), quick(epochs=1, **FEW), progress=False)


@pytest.fixture(scope="module")
def one_epoch_anew(model: LlamaForCausalLM, few_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    """Without a file of hidden states."""
    options = quick(epochs=1, **FEW, states=False)
    return train_head(model, few_texts, tmp_path_factory.mktemp("anew"), options, progress=False)


@pytest.fixture(scope="module")
def two_epochs(model: LlamaForCausalLM, few_texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    return train_head(model, few_texts, tmp_path_factory.mktemp("two"), quick(epochs=2, **FEW), progress=False)


class Stopped(BaseException):
    pass


def stop_at(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends in that training step."""
    forward: Callable[..., Any] = UnrolledTraining.forward
    steps = [0]

    def counting(self: UnrolledTraining, *args: Any, **kwargs: Any) -> Any:
        steps[0] += self.training
        if steps[0] == step:
            raise Stopped
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(UnrolledTraining, "forward", counting)


def test_a_training_that_was_stopped_ends_with_the_same_weights(
    model: LlamaForCausalLM, few_texts: Path, two_epochs: TrainedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = quick(epochs=2, **FEW)
    # From the beginning, from step 3, and from step 6, where the second of the two epochs begins.
    assert two_epochs.steps == 12
    for step in (5, 5, 4):
        with monkeypatch.context() as patched:
            stop_at(step, patched)
            with pytest.raises(Stopped):
                train_head(model, few_texts, tmp_path / "parts", options, progress=False)
    # As a process leaves it that was killed while it wrote.
    checkpoints = tmp_path / "parts" / "checkpoints"
    newest = max(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    shutil.copytree(newest, checkpoints / "checkpoint-999")
    (checkpoints / "checkpoint-999" / "trainer_state.json").write_text("{")
    parts = train_head(model, few_texts, tmp_path / "parts", options, progress=False)
    assert same_weights(two_epochs.folder, parts.folder) and parts.curve == two_epochs.curve
    last = f"checkpoints/checkpoint-{parts.steps}"
    assert same_weights(two_epochs.folder / last, parts.folder / last)


def test_minutes_end_a_training_that_the_same_call_continues(
    model: LlamaForCausalLM, few_texts: Path, one_epoch: TrainedHead, tmp_path: Path
) -> None:
    options = {"epochs": 1, **FEW}
    found = train_head(model, few_texts, tmp_path, quick(**options, minutes=0), progress=False)
    assert found.step == 1 and not found.finished and (tmp_path / "model.safetensors").exists()
    found = train_head(model, few_texts, tmp_path, quick(**options), progress=False)
    last = f"checkpoints/checkpoint-{found.steps}"
    assert found.finished and same_weights(one_epoch.folder / last, tmp_path / last)


def test_slices_write_the_same_head_as_a_training_in_one_go(
    model: LlamaForCausalLM, few_texts: Path, tmp_path: Path
) -> None:
    """They end between the evaluations, and judge nothing there."""
    options = quick(epochs=1, eval_every=2)
    whole = train_head(model, few_texts, tmp_path / "whole", options, progress=False)
    # Slices end between two evaluations, at one, and at the end.
    assert whole.steps > 3 and 2 in whole.curve and not {1, 3} & set(whole.curve)
    steps: list[int] = []
    while not steps or steps[-1] < whole.steps:
        found = train_head(model, few_texts, tmp_path / "parts", replace(options, minutes=0), progress=False)
        steps.append(found.step)
        assert found.curve.items() <= whole.curve.items()
    assert steps == list(range(1, whole.steps + 1))
    assert found.curve == whole.curve and found.acceptance == whole.acceptance
    assert same_weights(whole.folder, found.folder)
    assert (whole.folder / "training.json").read_text() == (found.folder / "training.json").read_text()


def train_until_killed(texts: Path, folder: Path) -> None:
    """Two epochs, which would end soon: it waits in a step after the first checkpoint."""
    torch.set_num_threads(1)
    forward, steps = UnrolledTraining.forward, [0]

    def waiting(self: UnrolledTraining, *args: Any, **kwargs: Any) -> Any:
        steps[0] += self.training
        if steps[0] == 5:
            time.sleep(600)
        return forward(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UnrolledTraining, "forward", waiting)
        train_head(learnable(), texts, folder, quick(epochs=2, **FEW), progress=False)


def test_a_killed_process_continues_to_the_same_weights(
    model: LlamaForCausalLM, few_texts: Path, two_epochs: TrainedHead, tmp_path: Path
) -> None:
    # A fork of a process whose autograd has started threads may not train, nor one of a process that uses a GPU.
    start = multiprocessing.get_context("spawn")
    child = start.Process(target=train_until_killed, args=(few_texts, tmp_path))
    child.start()
    try:
        until = time.monotonic() + 120
        while not any(tmp_path.glob("checkpoints/checkpoint-*/trainer_state.json")):
            assert child.is_alive() and time.monotonic() < until
            time.sleep(0.01)
    finally:
        child.kill()
        child.join()
    assert not (tmp_path / "model.safetensors").exists()
    train_head(model, few_texts, tmp_path, quick(epochs=2, **FEW), progress=False)
    assert same_weights(tmp_path, two_epochs.folder)


@pytest.mark.parametrize("what", ["hidden states", "weights", "optimizer"])
def test_a_full_disk_is_named_and_what_was_saved_stays(
    model: LlamaForCausalLM,
    few_texts: Path,
    one_epoch: TrainedHead,
    one_epoch_anew: TrainedHead,
    tmp_path: Path,
    what: str,
) -> None:
    """Files that may not grow further stand for a full disk."""
    whole = one_epoch if what == "hidden states" else one_epoch_anew
    size = (whole.folder / "checkpoints" / f"checkpoint-{whole.steps}" / "model.safetensors").stat().st_size
    limit = {"hidden states": 2000, "weights": size - 100, "optimizer": size + 100}[what]
    options = quick(epochs=1, **FEW, states=what == "hidden states")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        with raises(TrainingNotSaved):
            train_head(model, few_texts, tmp_path, options, progress=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    train_head(model, few_texts, tmp_path, options, progress=False)
    assert same_weights(tmp_path, whole.folder)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_loss_that_is_not_finite_ends_the_training(
    model: LlamaForCausalLM, few_texts: Path, two_epochs: TrainedHead, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = quick(epochs=2, **FEW)
    forward: Callable[..., Any] = UnrolledTraining.forward
    steps = [0]

    def breaking(self: UnrolledTraining, *args: Any, **kwargs: Any) -> Any:
        found = forward(self, *args, **kwargs)
        steps[0] += self.training
        return found | {"loss": found["loss"] * (float("nan") if steps[0] == 8 else 1)}

    with monkeypatch.context() as patched:
        patched.setattr(UnrolledTraining, "forward", breaking)
        with raises(TrainingDiverged, step=8):
            train_head(model, few_texts, tmp_path, options, progress=False)
    train_head(model, few_texts, tmp_path, options, progress=False)
    assert same_weights(tmp_path, two_epochs.folder)

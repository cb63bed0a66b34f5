"""A training continues from a checkpoint of its own that is as it was written, and from no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from speccompile.errors import CorruptCheckpoint, InvalidInput, InvalidOption
from speccompile.heads import load_eagle3, save_eagle3
from speccompile.training import TrainedHead, train_head
from speccompile.training.checkpoints import STATE
from support.chats import chat_tokenizer
from support.errors import raises
from support.training_data import greedy_texts, quick, write_texts

#: Two evaluations; the checkpoints of both stay.
OPTIONS: dict[str, Any] = {"epochs": 1, "eval_every": 5, "batch_tokens": 256}


@pytest.fixture(scope="module")
def texts(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_texts(tmp_path_factory.mktemp("texts"), model, greedy_texts(model, 80))


@pytest.fixture(scope="module")
def trained(model: LlamaForCausalLM, texts: Path, tmp_path_factory: pytest.TempPathFactory) -> TrainedHead:
    return train_head(model, texts, tmp_path_factory.mktemp("head"), quick(**OPTIONS), progress=False)


@pytest.fixture
def folder(trained: TrainedHead, tmp_path: Path) -> Path:
    """A copy of the training, to be damaged."""
    return Path(shutil.copytree(trained.folder, tmp_path / "head"))


def newest(folder: Path) -> Path:
    return max(folder.glob("checkpoints/checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))


def cut_off(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def change_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


FILES = ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth")


@pytest.mark.parametrize("damage", [Path.unlink, cut_off, change_a_bit])
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_checkpoint_is_named(
    model: LlamaForCausalLM, texts: Path, folder: Path, name: str, damage: Callable[[Path], None]
) -> None:
    checkpoint = newest(folder)
    damage(checkpoint / name)
    advice = re.compile(f"Delete the folder {re.escape(str(checkpoint))}, and the same call")
    with raises(CorruptCheckpoint, path=str(checkpoint / name), advice=advice):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    assert checkpoint.exists()


def test_what_the_message_says_mends_it(
    model: LlamaForCausalLM, texts: Path, trained: TrainedHead, folder: Path
) -> None:
    shutil.rmtree(newest(folder))
    found = train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    assert found.finished and found.curve == trained.curve and found.acceptance == trained.acceptance


def test_the_best_checkpoint_is_looked_at_before_training_goes_on(
    model: LlamaForCausalLM, texts: Path, trained: TrainedHead, folder: Path
) -> None:
    """It is read at the end alone."""
    checkpoints = folder / "checkpoints"
    older = min(checkpoints.glob("checkpoint-*"), key=lambda path: int(path.name.rpartition("-")[2]))
    state = json.loads((newest(folder) / STATE).read_text())
    state["best_global_step"] = int(older.name.rpartition("-")[2])
    (newest(folder) / STATE).write_text(json.dumps(state))
    advice = re.compile(f"delete the folder {re.escape(str(checkpoints))}, and the same call begins")
    cut_off(older / "model.safetensors")
    with raises(CorruptCheckpoint, path=str(older / "model.safetensors"), advice=advice):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    shutil.rmtree(older)
    with raises(CorruptCheckpoint, path=str(older / STATE), advice=advice):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    shutil.rmtree(checkpoints)
    assert train_head(model, texts, folder, quick(**OPTIONS), progress=False).acceptance == trained.acceptance


def test_a_moved_training_keeps_its_best_head(
    model: LlamaForCausalLM, texts: Path, trained: TrainedHead, folder: Path, tmp_path: Path
) -> None:
    """Checkpoints name the best one by the path that it had."""
    state = newest(folder) / STATE
    assert json.loads(state.read_text())["best_global_step"] < trained.steps
    state.write_text(state.read_text().replace(str(trained.folder), str(tmp_path / "gone")))
    (folder / "model.safetensors").unlink()
    assert train_head(model, texts, folder, quick(**OPTIONS), progress=False).acceptance == trained.acceptance
    one, other = (load_file(path / "model.safetensors") for path in (folder, trained.folder))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("of", ["another training", "another step", "no training"])
def test_a_checkpoint_that_was_copied_there_is_refused(
    model: LlamaForCausalLM, texts: Path, folder: Path, tmp_path: Path, of: str
) -> None:
    copied = folder / "checkpoints" / "checkpoint-99"
    if of == "another training":
        other = train_head(model, texts, tmp_path / "other", quick(**OPTIONS, seed=1, minutes=0), progress=False)
        copied = folder / "checkpoints" / "checkpoint-1"
        shutil.copytree(newest(other.folder), copied)
        for path in folder.glob("checkpoints/checkpoint-??"):
            shutil.rmtree(path)
        shutil.rmtree(folder / "checkpoints" / "checkpoint-5")
    elif of == "another step":
        shutil.copytree(newest(folder), copied)
    else:
        copied.mkdir()
        (copied / STATE).write_text("{}")
    with raises(CorruptCheckpoint, path=str(copied / STATE)):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)


def test_other_files_beside_checkpoints_are_left_alone(model: LlamaForCausalLM, texts: Path, folder: Path) -> None:
    kept = folder / "checkpoints" / "checkpoint-of-mine"
    kept.mkdir()
    assert train_head(model, texts, folder, quick(**OPTIONS), progress=False).finished and kept.exists()


# --- what a training depends on ------------------------------------------------------------------


def test_another_tokenizer_is_refused(model: LlamaForCausalLM, texts: Path, trained: TrainedHead) -> None:
    """Its special tokens are part of the draft vocabulary."""
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = "z"
    with raises(InvalidInput, name=f"the folder {trained.folder}", reason=re.compile("begun with kept tokens ")):
        train_head(model, texts, trained.folder, quick(**OPTIONS), tokenizer=tokenizer, progress=False)


def test_a_head_to_start_from_is_known_by_its_contents(
    model: LlamaForCausalLM, texts: Path, trained: TrainedHead, tmp_path: Path
) -> None:
    start = shutil.copytree(trained.folder, tmp_path / "start", ignore=lambda *_: ["checkpoints", "states"])
    options: dict[str, Any] = OPTIONS | {"layers": None, "minutes": 0}
    train_head(model, texts, tmp_path / "head", quick(start=str(start), **options), progress=False)
    moved = start.rename(tmp_path / "moved")
    found = train_head(model, texts, tmp_path / "head", quick(start=str(moved), **options), progress=False)
    assert found.step == 2
    head = load_eagle3(moved, model)
    with torch.no_grad():
        head.fc.weight[-1, -1] += 0.25
    save_eagle3(head, moved)
    with raises(InvalidInput, reason=re.compile("begun with start's weights v2:[0-9a-f]+ and not v2:")):
        train_head(model, texts, tmp_path / "head", quick(start=str(moved), **options), progress=False)


def test_a_head_cannot_be_trained_where_it_is(model: LlamaForCausalLM, texts: Path, folder: Path) -> None:
    """A slice would overwrite what the next one begins with."""
    shutil.rmtree(folder / "checkpoints")
    options = quick(start=str(folder / "states" / ".."), **OPTIONS | {"layers": None})
    with raises(InvalidOption, name="start", reason=re.compile("give another output")):
        train_head(model, texts, folder, options, progress=False)


def test_two_processes_do_not_train_in_one_folder(model: LlamaForCausalLM, texts: Path, folder: Path) -> None:
    """Each would remove what the other one is writing."""
    with (
        FileLock(folder / "checkpoints" / ".lock"),
        raises(InvalidInput, name=f"the folder {folder}", reason=re.compile("another process trains there")),
    ):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    assert train_head(model, texts, folder, quick(**OPTIONS), progress=False).finished


def test_a_training_of_an_earlier_version_is_refused(model: LlamaForCausalLM, texts: Path, folder: Path) -> None:
    path = folder / "checkpoints" / "given.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": 1}))
    with raises(InvalidInput, name=f"the folder {folder}", reason=re.compile("by another version")):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)
    path.write_text("{}")
    with raises(InvalidInput, name=f"the folder {folder / 'checkpoints'}", reason=re.compile("given.json: KeyError")):
        train_head(model, texts, folder, quick(**OPTIONS), progress=False)

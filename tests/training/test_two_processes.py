"""Two processes (gloo) train one head, as ``torchrun --nproc-per-node 2`` starts them."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from speccompile.errors import InvalidInput
from speccompile.training import train_head
from support.errors import raises
from support.pages import ROOT
from support.training_data import greedy_texts, learnable, quick, write_texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, model = tmp_path_factory.mktemp("two"), learnable()
    write_texts(folder / "texts", model, greedy_texts(model, 60))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "support.training_worker", str(folder)],
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank), "PYTHONPATH": path},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], errors
    return folder


@pytest.fixture(scope="module")
def found(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_both_processes_report_the_same_training(found: list[dict[str, Any]]) -> None:
    assert found[0] == found[1]
    assert found[0]["rates"][0] > 0.5


def test_slices_of_two_processes_give_the_same_head_as_the_whole(folder: Path, found: list[dict[str, Any]]) -> None:
    assert found[0]["stopped"] == [1, 2, found[0]["steps"]]
    assert found[0]["curves"][0] == found[0]["curves"][1]
    whole, parts = (load_file(folder / name / "model.safetensors") for name in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(weight, parts[name]) for name, weight in whole.items())


def test_each_process_has_its_share_of_the_batches(folder: Path, found: list[dict[str, Any]], tmp_path: Path) -> None:
    options = quick(epochs=8, eval_every=1000, batch_tokens=128, minutes=0.0)
    alone = train_head(learnable(), folder / "texts", tmp_path, options, progress=False)
    assert found[0]["steps"] == 8 * -(-(alone.steps // 8) // 2)


def test_one_process_does_not_continue_what_two_have_begun(folder: Path) -> None:
    options = quick(epochs=8, eval_every=20, batch_tokens=128)
    with raises(InvalidInput, reason=re.compile("processes 2 and not 1")):
        train_head(learnable(), folder / "texts", folder / "whole", options, progress=False)

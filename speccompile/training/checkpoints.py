"""Checkpoints of a training: which is the newest, and whether it is complete, unchanged and of this training."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import ExportableState

from speccompile.errors import CorruptCheckpoint, error_line

#: Of a checkpoint's files the one that ``Trainer`` writes last.
STATE = "trainer_state.json"
#: Names of checkpoints, with the step.
NUMBERED = re.compile(r"checkpoint-(\d+)")
#: Files that each process writes for itself.
OF_PROCESSES = "rng_state_"


class Signature(TrainerCallback, ExportableState):
    """Notes in each checkpoint which training it is of, and the digests of its files.

    Args:
        folder: of the checkpoints.
        training: a digest of what the training depends on.
    """

    def __init__(self, folder: Path, training: str) -> None:
        self._folder, self._training = folder, training
        self._checkpoint: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # A checkpoint names the best one by its path, and the folder may have been moved.
        if state.best_global_step is not None:
            state.best_model_checkpoint = str(_checkpoint(self._folder, state.best_global_step))
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._checkpoint = _checkpoint(self._folder, state.global_step)
        return control

    def state(self) -> dict[str, Any]:
        """``Trainer`` asks for it when all other files of a checkpoint are written, and puts it into the last one."""
        files = {} if self._checkpoint is None else _digests(self._checkpoint)
        return {"args": {}, "attributes": {"training": self._training, "files": files}}


def newest_checkpoint(folder: Path, training: str) -> Path | None:
    """The newest complete checkpoint. What a killed process left of others is removed.

    Args:
        training: a digest of what the training depends on.

    Raises:
        CorruptCheckpoint: it, or the best one before it, is damaged or of another training.
    """
    names = (NUMBERED.fullmatch(path.name) for path in folder.glob("*"))
    for step in sorted((int(name[1]) for name in names if name), reverse=True):
        path = _checkpoint(folder, step)
        try:
            state = json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            # Another process of this training may do so, too.
            shutil.rmtree(path, ignore_errors=True)
            continue
        advice = f"Delete the folder {path}, and the same call continues from the checkpoint before it"
        _check(path, step, state, training, advice)
        best = state.get("best_global_step")
        if best not in (None, step):
            advice = f"The best head so far is in it: delete the folder {folder}, and the same call begins anew"
            _check_best(_checkpoint(folder, best), best, training, advice)
        return path
    return None


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / f"checkpoint-{step}"


def _check_best(path: Path, step: int, training: str, advice: str) -> None:
    """Raises CorruptCheckpoint."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(path=str(path / STATE), reason=error_line(error), advice=advice) from error
    _check(path, step, state, training, advice)


def _check(path: Path, step: int, state: Any, training: str, advice: str) -> None:
    """Raises CorruptCheckpoint."""
    try:
        noted = state["stateful_callbacks"][Signature.__name__]["attributes"]
        files, other = dict(noted["files"]), (noted["training"], state["global_step"]) != (training, step)
    except (KeyError, TypeError, ValueError):
        files, other = {}, True
    if other:
        reason = f"it is not of step {step} of this training"
        raise CorruptCheckpoint(path=str(path / STATE), reason=reason, advice=advice)
    for name, digest in files.items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise CorruptCheckpoint(path=str(path / name), reason=error_line(error), advice=advice) from error
        if found != digest:
            reason = "it is not what the training wrote"
            raise CorruptCheckpoint(path=str(path / name), reason=reason, advice=advice)


def _digests(checkpoint: Path) -> dict[str, str]:
    """By name of a file. Those of other processes may not be complete yet."""
    files = sorted(path for path in checkpoint.glob("*") if path.is_file() and path.name != STATE)
    return {path.name: _digest(path) for path in files if not path.name.startswith(OF_PROCESSES)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

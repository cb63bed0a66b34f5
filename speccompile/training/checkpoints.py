"""Checkpoints of a training: search for the newest, and checks that it is complete, unchanged and of this training."""

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

#: Last file of a checkpoint that ``Trainer`` writes.
STATE = "trainer_state.json"
#: Names of checkpoints. They contain the step.
NUMBERED = re.compile(r"checkpoint-(\d+)")
#: Prefix of files that each process writes.
OF_PROCESSES = "rng_state_"


class Signature(TrainerCallback, ExportableState):
    """Records in each checkpoint the training that it belongs to, and the digests of its files.

    Args:
        folder: folder of the checkpoints.
        training: digest of all inputs of the training.
    """

    def __init__(self, folder: Path, training: str) -> None:
        self._folder, self._training = folder, training
        self._checkpoint: Path | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        # A checkpoint stores the path of the best one, and the folder may have been moved.
        if state.best_global_step is not None:
            state.best_model_checkpoint = str(_checkpoint(self._folder, state.best_global_step))
        return control

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> TrainerControl:
        self._checkpoint = _checkpoint(self._folder, state.global_step)
        return control

    def state(self) -> dict[str, Any]:
        """State for the last file of a checkpoint. ``Trainer`` calls this when all other files are written."""
        files = {} if self._checkpoint is None else _digests(self._checkpoint)
        return {"args": {}, "attributes": {"training": self._training, "files": files}}


def newest_checkpoint(folder: Path, training: str) -> Path | None:
    """Find the newest complete checkpoint. Incomplete ones, of a killed process, are removed.

    Args:
        training: digest of all inputs of the training.

    Raises:
        CorruptCheckpoint: it, or the best one before it, is damaged or belongs to another training.
    """
    names = (NUMBERED.fullmatch(path.name) for path in folder.glob("*"))
    for step in sorted((int(name[1]) for name in names if name), reverse=True):
        path = _checkpoint(folder, step)
        try:
            state = json.loads((path / STATE).read_text())
        except (OSError, ValueError):
            # Another process of this training may also remove it.
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
    """Raise CorruptCheckpoint if the best checkpoint is damaged."""
    try:
        state = json.loads((path / STATE).read_text())
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(path=str(path / STATE), reason=error_line(error), advice=advice) from error
    _check(path, step, state, training, advice)


def _check(path: Path, step: int, state: Any, training: str, advice: str) -> None:
    """Raise CorruptCheckpoint if a file is damaged, or the checkpoint belongs to another step or training."""
    try:
        noted = state["stateful_callbacks"][Signature.__name__]["attributes"]
        files, other = dict(noted["files"]), (noted["training"], state["global_step"]) != (training, step)
    except (KeyError, TypeError, ValueError):
        files, other = {}, True
    if other:
        reason = f"it does not belong to step {step} of this training"
        raise CorruptCheckpoint(path=str(path / STATE), reason=reason, advice=advice)
    for name, digest in files.items():
        try:
            found = _digest(path / name)
        except OSError as error:
            raise CorruptCheckpoint(path=str(path / name), reason=error_line(error), advice=advice) from error
        if found != digest:
            reason = "it was changed after the training wrote it"
            raise CorruptCheckpoint(path=str(path / name), reason=reason, advice=advice)


def _digests(checkpoint: Path) -> dict[str, str]:
    """Digests of files by name. Files of other processes are left out, since they may be incomplete."""
    files = sorted(path for path in checkpoint.glob("*") if path.is_file() and path.name != STATE)
    return {path.name: _digest(path) for path in files if not path.name.startswith(OF_PROCESSES)}


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

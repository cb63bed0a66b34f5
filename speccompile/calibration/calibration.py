"""A calibration: how large the inputs of each linear are, and of which model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from transformers import PreTrainedModel

from speccompile.errors import InvalidCalibration, error_line
from speccompile.hidden_states.target_id import is_id_of, target_id
from speccompile.utils.whole_files import write_whole

FORMAT = "speccompile calibration 1"


@dataclass(frozen=True, eq=False)
class Calibration:
    """Result of :func:`~speccompile.calibration.gather.calibrate`.

    Args:
        target: the :func:`~speccompile.hidden_states.target_id.target_id` of the calibrated model.
        tokens: number of tokens that the model read.
        importance: mean square of each input of a linear, float32 ``[K]``, by the name of the linear's weight.
        source: the file or call that it came from, for error messages.
        tokens: how many it read.
        importance: by the name of a linear's weight in the model, the mean square of each input, float32 ``[K]``.
        source: where it was read from, for messages.
    """

    target: str
    tokens: int
    importance: Mapping[str, torch.Tensor]
    source: str = "in memory"

    @cached_property
    def digest(self) -> str:
        """Hash of :attr:`importance`."""
        digest = hashlib.sha256()
        for name in sorted(self.importance):
            values = self.importance[name]
            digest.update(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
            digest.update(values.contiguous().numpy().tobytes())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Write a safetensors file.

        Raises:
            OSError: the file cannot be written.
        """
        metadata = {"format": FORMAT, "target": self.target, "tokens": str(self.tokens), "digest": self.digest}
        write_whole(Path(path), save(dict(self.importance), metadata))

    @staticmethod
    def load(path: str | Path) -> Calibration:
        """Read a file that :meth:`save` wrote.

        Raises:
            InvalidCalibration: the file is missing, damaged or something else.
        """

        def refuse(reason: str) -> InvalidCalibration:
            return InvalidCalibration(source=str(path), reason=reason)

        if not Path(path).is_file():
            raise refuse("the file does not exist")
        try:
            with safe_open(path, "pt") as file:
                metadata = file.metadata() or {}
            importance = load_file(path)
        except (OSError, SafetensorError) as error:
            raise refuse(f"it cannot be read ({error_line(error)})") from error
        if metadata.get("format") != FORMAT:
            raise refuse(f"its format is {metadata.get('format')!r}, and this version reads {FORMAT!r}")
        found = Calibration(metadata["target"], int(metadata["tokens"]), importance, str(path))
        if found.digest != metadata["digest"]:
            raise refuse("its SHA-256 differs from that of the values which were written; calibrate again")
        return found

    def check(self, model: PreTrainedModel) -> None:
        """Check that the calibration belongs to ``model``. The dtype of the weights may differ.

        Raises:
            InvalidCalibration: it belongs to another model, or to other weights.
        """
        if not is_id_of(self.target, model):
            reason = f"it belongs to {self.target}, and this model is {target_id(model)}; calibrate this model"
            raise InvalidCalibration(source=self.source, reason=reason)

    def check_covers(self, weights: Iterable[Iterable[str]]) -> None:
        """Check that the calibration covers each of ``weights``; each is given by all of its names.

        Raises:
            InvalidCalibration: a weight is missing; the error names the first.
        """
        missing = [names for names in map(list, weights) if self.importance.keys().isdisjoint(names)]
        if missing:
            others = f" and of {len(missing) - 1} others" if len(missing) > 1 else ""
            reason = f"it has no inputs of {missing[0][0]}{others}: no text used them, or the file is incomplete"
            raise InvalidCalibration(source=self.source, reason=reason)

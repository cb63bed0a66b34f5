"""One text with its hidden states, and how several of them lie in a safetensors file.

The fields are those of the files that TensorRT-LLM (``SaveHiddenStatesResourceManager``) and SpecForge
(``prepare_hidden_states.py``) write. Captured layers are stored once, though both have a name for them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from transformers import PreTrainedModel

from speccompile.errors import CorruptRecords, error_line
from speccompile.hidden_states.options import FINAL, SaveHiddenStates

FORMAT = 1
#: Under which a file's metadata has what it is about.
KEY = "speccompile"
FIELDS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
#: A field that not all files have.
CHOICES = "choices"


@dataclass(frozen=True)
class RecordOrder:
    """That a request's hidden states are to be saved.

    Args:
        id: of the record.
        loss_mask: of the prompt's tokens; None is 0 for all of them.
    """

    id: str
    loss_mask: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Record:
    """A text of ``n + 1`` tokens or more, of which the target has read ``n``.

    Args:
        id: unique in its folder.
        input_ids: int64 ``[n]``, what the target has read: all but the newest token.
        loss_mask: int64 ``[n]``, 1 at tokens to learn from: those that the target has written, or as was given.
        hidden_state: ``[n, M]``, behind the final norm, what the lm_head reads.
        aux_hidden_state: ``[n, layers * M]``, the captured layers' outputs side by side.
        layers: the captured ones, -1 being the final norm.
        choices: int32 ``[n]``, the target's likeliest token after each; None where that was not saved.
    """

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_state: torch.Tensor
    aux_hidden_state: torch.Tensor
    layers: tuple[int, ...]
    choices: torch.Tensor | None = None

    def as_trtllm(self) -> dict[str, Any]:
        """As TensorRT-LLM saves it: without ``aux_hidden_states`` if the final norm alone was captured.

        Source: TensorRT-LLM, ``tensorrt_llm/_torch/speculative/save_hidden_state.py``.
        """
        saved = {"id": self.id, "input_ids": self.input_ids, "hidden_state": self.hidden_state}
        return saved if self.layers == (FINAL,) else saved | {"aux_hidden_states": self.aux_hidden_state}

    def as_specforge(self) -> dict[str, torch.Tensor]:
        """As SpecForge saves it, with hidden states of a batch of one."""
        return {
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
            "hidden_state": self.hidden_state[None],
            "aux_hidden_state": self.aux_hidden_state[None],
        }


@dataclass(frozen=True)
class About:
    """What all records of a folder have in common.

    Args:
        model: class of the target.
        weights: a digest of some of its weights' values, and to what they were rounded.
        layers: captured ones, -1 being the final norm.
        dtype: of the hidden states.
    """

    model: str
    weights: str
    layers: tuple[int, ...]
    dtype: str


def about(model: PreTrainedModel, options: SaveHiddenStates, weights: str = "same") -> About:
    """Args:
    weights: as ``wrap`` takes it: rounded ones are another model's.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    rounded = "" if weights == "same" else f" {weights}"
    return About(type(model).__name__, f"{weights_digest(model)}{rounded}", options.layers(model), dtype)


def weights_digest(model: PreTrainedModel) -> str:
    """Of the first values of each weight: tells a model from another one of its kind."""
    values = [weight.detach().reshape(-1)[:4].float() for weight in model.parameters()]
    return hashlib.sha256(torch.cat(values).cpu().numpy().tobytes()).hexdigest()[:16]


def encode(about: About, records: Sequence[Record]) -> bytes:
    """A file of these."""
    described = {
        "format": FORMAT,
        "model": about.model,
        "weights": about.weights,
        "layers": about.layers,
        "dtype": about.dtype,
        "ids": [record.id for record in records],
    }
    tensors = {
        f"{index}.{field}": getattr(record, field).contiguous()
        for index, record in enumerate(records)
        for field in FIELDS
    }
    for index, record in enumerate(records):
        if record.choices is not None:
            tensors[f"{index}.{CHOICES}"] = record.choices
    return save(tensors, {KEY: json.dumps(described)})


def read_header(path: Path) -> tuple[About, list[str]] | None:
    """What a file is about, and the ids of its records in order; None if it is no file of records.

    Raises:
        CorruptRecords: it is cut off or changed.
    """
    try:
        with safe_open(path, "pt") as file:
            described = json.loads((file.metadata() or {}).get(KEY, "null"))
        if described is None:
            return None
        if described["format"] == FORMAT:
            return _about(described), list(described["ids"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error
    reason = f"its format is {described['format']}, and this version reads {FORMAT}"
    raise CorruptRecords(path=str(path), reason=reason)


def _about(described: Mapping[str, Any]) -> About:
    return About(described["model"], described["weights"], tuple(described["layers"]), described["dtype"])


def read_text(path: Path, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``loss_mask`` of a record, without its hidden states.

    Raises:
        CorruptRecords: the file was cut off or taken away meanwhile.
    """
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(f"{index}.input_ids"), file.get_tensor(f"{index}.loss_mask")
    except (OSError, SafetensorError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error


def read_record(path: Path, index: int, id: str, layers: tuple[int, ...]) -> Record:
    """One of a file whose records have these layers.

    Raises:
        CorruptRecords: the file was cut off or taken away meanwhile.
    """
    try:
        with safe_open(path, "pt") as file:
            fields = {field: file.get_tensor(f"{index}.{field}") for field in FIELDS}
            choices = f"{index}.{CHOICES}"
            known = file.get_tensor(choices) if choices in set(file.keys()) else None
            return Record(id, layers=layers, choices=known, **fields)
    except (OSError, SafetensorError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error

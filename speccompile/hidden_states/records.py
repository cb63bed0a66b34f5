"""Records: sequences with their hidden states, and their layout in safetensors files.

The fields are those of the files of TensorRT-LLM (``SaveHiddenStatesResourceManager``) and SpecForge
(``prepare_hidden_states.py``). Captured layers are stored once, although both of these store them twice.
"""

from __future__ import annotations

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
from speccompile.hidden_states.target_id import target_id

FORMAT = 1
#: The key of the header in a file's metadata.
KEY = "speccompile"
FIELDS = ("input_ids", "loss_mask", "hidden_state", "aux_hidden_state")
#: An optional field of a record.
CHOICES = "choices"


@dataclass(frozen=True)
class RecordSpec:
    """The record that is saved for a request.

    Args:
        id: the record's id.
        loss_mask: a 0 or 1 for each prompt token; None means 0 for all of them.
    """

    id: str
    loss_mask: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Record:
    """A sequence of at least ``n + 1`` tokens, of which the target has processed ``n``.

    Args:
        id: unique in its folder.
        input_ids: int64 ``[n]``, the tokens that the target has processed: all but the newest one.
        loss_mask: int64 ``[n]``, 1 at tokens to learn from: the target's own tokens, or the given mask.
        hidden_state: ``[n, M]``, after the final norm: the input of the lm_head.
        aux_hidden_state: ``[n, layers * M]``, the captured layers' outputs side by side.
        layers: the captured layers; -1 is the final norm.
        choices: int32 ``[n]``, the target's likeliest token after each position; None if it was not saved.
    """

    id: str
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_state: torch.Tensor
    aux_hidden_state: torch.Tensor
    layers: tuple[int, ...]
    choices: torch.Tensor | None = None

    def as_trtllm(self) -> dict[str, Any]:
        """Return the dict that TensorRT-LLM saves: no ``aux_hidden_states`` if only the final norm was captured.

        Source: TensorRT-LLM, ``tensorrt_llm/_torch/speculative/save_hidden_state.py``.
        """
        saved = {"id": self.id, "input_ids": self.input_ids, "hidden_state": self.hidden_state}
        return saved if self.layers == (FINAL,) else saved | {"aux_hidden_states": self.aux_hidden_state}

    def as_specforge(self) -> dict[str, torch.Tensor]:
        """Return the dict that SpecForge saves, with hidden states of a batch of one."""
        return {
            "input_ids": self.input_ids,
            "loss_mask": self.loss_mask,
            "hidden_state": self.hidden_state[None],
            "aux_hidden_state": self.aux_hidden_state[None],
        }


@dataclass(frozen=True)
class About:
    """The facts that all records of a folder share.

    Args:
        model: class of the target.
        weights: the part of the target's :func:`~speccompile.hidden_states.target_id.target_id` after the class.
        layers: the captured layers; -1 is the final norm.
        dtype: dtype of the hidden states.
    """

    model: str
    weights: str
    layers: tuple[int, ...]
    dtype: str


def about(model: PreTrainedModel, options: SaveHiddenStates, weights: str = "same") -> About:
    """Return the facts that all records of ``model`` share.

    Args:
        weights: the option of ``wrap``. Records of rounded weights belong to another model.
    """
    dtype = str(model.dtype).removeprefix("torch.")
    name, _, rest = target_id(model, weights).partition(" ")
    return About(name, rest, options.layers(model), dtype)


def encode(about: About, records: Sequence[Record]) -> bytes:
    """Encode these records as the bytes of a file."""
    header = {
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
    return save(tensors, {KEY: json.dumps(header)})


def read_header(path: Path) -> tuple[About, list[str]] | None:
    """Return the header of a file, and the ids of its records in order; None if the file has no records.

    Raises:
        CorruptRecords: the file is truncated or changed.
    """
    try:
        with safe_open(path, "pt") as file:
            header = json.loads((file.metadata() or {}).get(KEY, "null"))
        if header is None:
            return None
        if header["format"] == FORMAT:
            return _about(header), list(header["ids"])
    except (OSError, SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error
    reason = f"its format is {header['format']}, and this version only reads {FORMAT}"
    raise CorruptRecords(path=str(path), reason=reason)


def _about(header: Mapping[str, Any]) -> About:
    return About(header["model"], header["weights"], tuple(header["layers"]), header["dtype"])


def read_text(path: Path, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """``input_ids`` and ``loss_mask`` of a record, without its hidden states.

    Raises:
        CorruptRecords: the file was truncated or removed meanwhile.
    """
    try:
        with safe_open(path, "pt") as file:
            return file.get_tensor(f"{index}.input_ids"), file.get_tensor(f"{index}.loss_mask")
    except (OSError, SafetensorError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error


def read_record(path: Path, index: int, id: str, layers: tuple[int, ...]) -> Record:
    """Read one record of a file whose records have these ``layers``.

    Raises:
        CorruptRecords: the file was truncated or removed meanwhile.
    """
    try:
        with safe_open(path, "pt") as file:
            fields = {field: file.get_tensor(f"{index}.{field}") for field in FIELDS}
            choices = f"{index}.{CHOICES}"
            known = file.get_tensor(choices) if choices in set(file.keys()) else None
            return Record(id, layers=layers, choices=known, **fields)
    except (OSError, SafetensorError) as error:
        raise CorruptRecords(path=str(path), reason=error_line(error)) from error

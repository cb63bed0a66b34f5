"""Made-up checkpoints with MTP modules, as families publish them: of the weights of a head that is there."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from speccompile.heads import MtpHead

Weights = dict[str, torch.Tensor]

#: Where a layout has what :class:`MtpHead` calls ``layers.{k}.`` and ``norms.{k}.``; of the layer itself the rest.
PLACES: dict[str, dict[str, str]] = {
    "deepseek": {
        "enorm": "model.layers.{n}.enorm",
        "hnorm": "model.layers.{n}.hnorm",
        "eh_proj": "model.layers.{n}.eh_proj",
        "block": "model.layers.{n}",
        "norm": "model.layers.{n}.shared_head.norm",
    },
    "qwen": {
        "enorm": "mtp.pre_fc_norm_embedding",
        "hnorm": "mtp.pre_fc_norm_hidden",
        "eh_proj": "mtp.fc",
        "block": "mtp.layers.{k}",
        "norm": "mtp.norm",
    },
    "mimo": {
        "enorm": "model.mtp_layers.{k}.token_layernorm",
        "hnorm": "model.mtp_layers.{k}.hidden_layernorm",
        "eh_proj": "model.mtp_layers.{k}.input_proj",
        "block": "model.mtp_layers.{k}",
        "norm": "model.mtp_layers.{k}.final_layernorm",
    },
    "ernie": {
        "enorm": "model.mtp_emb_norm.{k}",
        "hnorm": "model.mtp_hidden_norm.{k}",
        "eh_proj": "model.mtp_linear_proj.{k}",
        "block": "model.mtp_block.{k}",
    },
}


def keys_of(head: MtpHead, layout: str, target_layers: int) -> Weights:
    """The head's own tensors by the layout's names, each expert apart."""
    found: Weights = {}
    for name, value in [*head.layers.state_dict().items(), *head.norms.state_dict().items()]:
        number, _, rest = name.partition(".")
        part, _, leaf = rest.partition(".")
        if part == "weight":
            part, leaf = "norm", rest
        place = PLACES[layout][part].format(k=number, n=target_layers + int(number))
        found |= _experts_apart(f"{place}.{leaf}", value)
    return found


def _experts_apart(key: str, value: torch.Tensor) -> Weights:
    if not key.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {key: value}
    prefix, _, name = key.rpartition(".")
    parts = ("gate_proj", "up_proj") if name == "gate_up_proj" else ("down_proj",)
    return {
        f"{prefix}.{index}.{part}.weight": piece
        for index, expert in enumerate(value)
        for part, piece in zip(parts, expert.chunk(len(parts)), strict=True)
    }


def write(folder: Path, model: PreTrainedModel, tensors: Weights) -> Path:
    """``model`` as it saves itself, with ``tensors`` in the same file."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    with safe_open(path, framework="pt") as file:
        own = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118  it is not a dict
        metadata = file.metadata()
    save_file(own | {key: value.contiguous().clone() for key, value in tensors.items()}, path, metadata)
    return folder

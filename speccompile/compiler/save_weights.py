"""Writes the packed weights of a wrap, with the model's other tensors, as a packed folder."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile.errors import CannotSave
from speccompile.graph_capture.model_info import named_tensors
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.quantized.packed_weight import PackedWeight
from speccompile.quantized.packed_writer import write_packed
from speccompile.utils.devices import traits_of
from speccompile.utils.progress import task


def save_weights(
    folder: Path,
    model: PreTrainedModel,
    packs: WeightPacks,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head: Path | None = None,
) -> None:
    """Write ``folder`` completely or not at all, and compare each tensor on the disk with the one in memory.

    Raises:
        CannotSave: no weight is rounded, the model is on a GPU, or an adapter is in its layers.
        InvalidOption: ``folder`` contains files.
        DamagedCheckpoint: the disk has other bytes than were written.
        OSError: the disk is full or cannot be written.
    """
    weights = {
        path: PackedWeight(pack.form.name, pack.tensors, (pack.features, pack.depth), pack.order)
        for path, pack in packs.items()
        if pack.form.rounds
    }
    others = _others(model, {name for path in weights for name in packs.names_of(path)})
    reason = ""
    if not weights:
        reason = "none of them is rounded; wrap with weights='int4', or use save_pretrained of the model"
    elif not traits_of(model.device).host_memory:
        reason = f"they are on {model.device}; wrap the model on the CPU"
    elif any(".base_layer." in name for name in (*weights, *others)):
        reason = "an adapter is in the model's layers; merge it (merge_and_unload), and wrap the result"
    if reason:
        raise CannotSave(name="the weights", reason=reason)
    stored = packs.quantized
    format = "a packed folder" if stored is None or "packed folder" in stored.format else f"packed {stored.format}"
    with task(f"write {folder}"):
        write_packed(folder, model, weights, others, format=format, tokenizer=tokenizer, head=head)
    with task(f"verify {folder}"):
        PackedFolder(folder).verify()


def _others(model: PreTrainedModel, packed: set[str]) -> dict[str, torch.Tensor]:
    """Parameters and stored buffers that are in no pack, each by one name."""
    computed = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        # Those of freed originals are packs, too.
        if name not in packed and name not in computed and ".parametrizations." not in name:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())

"""Writes the packed weights of a wrap, with the model's other tensors, as a packed folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile.errors import CannotSaveWeights
from speccompile.graph_capture.model_info import named_tensors
from speccompile.graph_capture.rotary import settle_rotary
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.quantized.models import load_packed
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.quantized.packed_weight import PackedWeight
from speccompile.quantized.packed_writer import write_packed
from speccompile.utils.devices import traits_of
from speccompile.utils.progress import task


def check_model(model: PreTrainedModel) -> None:
    """Check that a packed folder can have the weights of ``model``, before they are packed.

    Raises:
        CannotSaveWeights: the model is on a GPU, or an adapter is in its layers.
    """
    reason = ""
    if not traits_of(model.device).host_memory:
        reason = f"they are on {model.device}; load the model on the CPU"
    elif any(".base_layer." in name for name in named_tensors(model)):
        reason = "an adapter is in the model's layers; merge it (merge_and_unload), and use the result"
    if reason:
        raise _cannot(model, reason)


def save_weights(
    folder: Path,
    model: PreTrainedModel,
    packs: WeightPacks,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head: Path | None = None,
) -> None:
    """Write ``folder`` completely or not at all. Before it has its name, each tensor in it is compared with the one in
    memory, and a model that is loaded from it with ``model``.

    Raises:
        CannotSaveWeights: no weight is rounded, the model is on a GPU or has an adapter in its layers, or a model that
            is loaded from the folder differs.
        InvalidOption: ``folder`` contains files.
        DamagedCheckpoint: other bytes were written.
        OSError: the disk is full or cannot be written.
    """
    check_model(model)
    weights = {
        path: PackedWeight(pack.form.name, pack.tensors, pack.shape, pack.order, pack.transposed)
        for path, pack in packs.items()
        if pack.form.rounds
    }
    if not weights:
        raise _cannot(model, "none of them is rounded; wrap with weights='int4', or use save_pretrained of the model")
    packed = {name for path in weights for name in packs.names_of(path)}
    others = _others(model, packed, computed=False)
    others |= {
        # Freed weights that are not rounded.
        path: pack.unpack()
        for path, pack in packs.items()
        if pack.weight is None and not pack.form.rounds
    }

    def check(written: Path) -> None:
        with task(f"verify {folder}"):
            PackedFolder(written).verify()
            loaded, _ = load_packed(written)
            settle_rotary(loaded)
            _check_loaded(model, loaded, others | _others(model, packed, computed=True))

    stored = "" if packs.quantized is None else packs.quantized.format
    format = stored if stored.startswith("packed ") else f"packed {stored or 'weights'}"
    with task(f"write {folder}"):
        write_packed(folder, model, weights, others, format=format, tokenizer=tokenizer, head=head, check=check)


def _check_loaded(model: PreTrainedModel, loaded: PreTrainedModel, wanted: Mapping[str, torch.Tensor]) -> None:
    """Check that a model from the folder is as ``model``, but for its packed weights.

    Raises:
        CannotSaveWeights: it is of another class, or a tensor differs.
    """
    if type(loaded) is not type(model):
        raise _cannot(model, f"transformers loads a {type(loaded).__name__} with its configuration")
    found = named_tensors(loaded)
    for name, tensor in wanted.items():
        other = found.get(name)
        if other is None or other.dtype != tensor.dtype or not torch.equal(other, tensor):
            reason = (
                f"{name} differs in a model that transformers loads with its configuration. A model that was converted "
                "(model.to(dtype)) has other buffers; load it with from_pretrained(..., dtype=...)"
            )
            raise _cannot(model, reason)


def _cannot(model: PreTrainedModel, reason: str) -> CannotSaveWeights:
    return CannotSaveWeights(model=type(model).__name__, reason=reason)


def _others(model: PreTrainedModel, packed: set[str], *, computed: bool) -> dict[str, torch.Tensor]:
    """Parameters and buffers that are in no pack, each by one name.

    Args:
        computed: whether buffers are those that the model computes, instead of those that checkpoints have.
    """
    names = {
        f"{path}.{name}".removeprefix(".")
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for name, tensor in named_tensors(model).items():
        # Those of freed originals are packs, too.
        if name not in packed and (name in names) == computed and ".parametrizations." not in name:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())

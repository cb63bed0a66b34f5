"""Loads packed folders, whose weights stay in the mapped files."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from transformers import PreTrainedModel

from speccompile.errors import InvalidOption
from speccompile.ops.cpu.quantized import QuantizedPacks, quantizing
from speccompile.quantized.models import load_packed
from speccompile.quantized.packed_manifest import read_manifest
from speccompile.utils.devices import traits_of
from speccompile.utils.host_memory import check_host_memory
from speccompile.utils.loading_bars import without_loading_bars


def load_mapped(
    folder: str, *, dtype: torch.dtype | str, ranks: int, device: torch.device | str | None, verify: bool
) -> PreTrainedModel:
    """Load a model whose weights are mapped from a packed folder. ``wrap`` uses them as they are.

    Args:
        verify: whether every tensor is compared with the hash that was written.

    Raises:
        InvalidOption: ``dtype`` is another one than the folder's, ``ranks`` is larger than 1, or ``device`` is a GPU.
        DamagedCheckpoint: a file is missing, truncated or changed.
        UnsupportedCheckpoint: another version of the package wrote the folder.
        HostMemoryFull: the machine has less free memory than the weights need.
    """
    manifest = read_manifest(Path(folder))
    own = getattr(torch, manifest.dtype)
    if dtype not in ("auto", own, manifest.dtype):
        reason = f"the folder's weights are packed, for {manifest.dtype}; use 'auto'"
        raise InvalidOption(where="load", name="dtype", value=dtype, reason=reason)
    if ranks > 1:
        reason = "packed weights cannot be split over processes; use 1"
        raise InvalidOption(where="load", name="ranks", value=ranks, reason=reason)
    if device is not None and not traits_of(torch.device(device)).host_memory:
        reason = "packed folders are mapped by the CPU; leave it out, or load the model that was quantised"
        raise InvalidOption(where="load", name="device", value=str(device), reason=reason)
    check_host_memory(f"the packed weights of {folder}", sum(file.nbytes for file in manifest.files.values()))
    with without_loading_bars():
        model, packed = load_packed(Path(folder))
    if verify:
        packed.verify()
    packs = QuantizedPacks.of_weights(packed.weights)
    with quantizing(model, packs):
        packs.install(model)
    # Mode auto looks there for a head later.
    model.config._name_or_path = os.path.abspath(folder)
    return model

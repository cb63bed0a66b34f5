"""Writes a packed folder: safetensors files with packed weights, configuration, tokenizer, and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import BinaryIO

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import GENERATION_CONFIG_NAME

from speccompile.errors import CannotSaveWeights, InvalidOption
from speccompile.quantized.packed_manifest import MANIFEST, Manifest, StoredFile, StoredWeight
from speccompile.quantized.packed_weight import PackedWeight
from speccompile.utils.declared_quantization import CONFIG, CONFIG_NAMES

#: Most bytes of tensors in a file. One weight may be larger.
FILE_BYTES = 1 << 30
#: Tensors begin at a multiple of a cache line. The library writes headers of a multiple of 8 bytes, so 64 bytes of a
#: mapped weight would lie on two lines.
ALIGNMENT = 64
#: Subfolder of a draft head.
HEAD = "head"

_DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float64: "F64",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def check_output(folder: Path) -> None:
    """Check that ``folder`` can be written, before the work whose result it will hold.

    Raises:
        InvalidOption: it contains files, or cannot be created.
    """
    reason = ""
    if folder.is_symlink() or folder.is_file() or (folder.is_dir() and (any(folder.iterdir()) or folder.is_mount())):
        reason = "it exists, and is not an empty folder; give the path of a new folder"
    elif not folder.parent.is_dir():
        reason = f"there is no folder {str(folder.parent)!r}; create it, or give another path"
    elif not os.access(folder.parent, os.W_OK):
        reason = "it cannot be written (permission denied); give another path"
    if reason:
        raise InvalidOption(where="quantize", name="folder", value=str(folder), reason=reason)


def write_packed(
    folder: Path,
    model: PreTrainedModel,
    weights: Mapping[str, PackedWeight],
    others: Mapping[str, torch.Tensor],
    *,
    format: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    head: Path | None = None,
    check: Callable[[Path], object],
) -> None:
    """Write ``folder`` completely or not at all.

    Args:
        model: its configuration and generation settings are written.
        weights: packed weights, by names of the model's parameters.
        others: the model's other tensors, by name.
        format: what was packed, for ``explain()``.
        head: folder of a draft head, which is copied.
        check: called with the complete folder, before it has its name. If it raises an error, nothing remains.

    Raises:
        InvalidOption: ``folder`` contains files.
        CannotSaveWeights: a tensor has a dtype that safetensors files do not have.
        OSError: the disk is full or cannot be written.
    """
    check_output(folder)
    for name, tensor in others.items():
        if tensor.dtype not in _DTYPES:
            raise CannotSaveWeights(model=type(model).__name__, reason=f"{name} is {tensor.dtype}")
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        _write_configuration(partial, model, tokenizer)
        if head is not None:
            shutil.copytree(head, partial / HEAD)
        files = {
            str(path.relative_to(partial)): StoredFile(path.stat().st_size, _digest(path), {})
            for path in sorted(partial.rglob("*"))
            if path.is_file()
        }
        stored = {name: _stored(name, weight) for name, weight in weights.items()}
        tensors = [*_tensors_of(weights, stored), *others.items()]
        for number, group in enumerate(_groups(tensors), 1):
            name = f"packed-{number:05}.safetensors"
            files[name] = _write_tensors(partial / name, group)
        dtype = str(model.dtype).removeprefix("torch.")
        manifest = Manifest(format, dtype, stored, files, HEAD if head is not None else None)
        (partial / MANIFEST).write_text(manifest.to_json(), encoding="utf-8")
        check(partial)
        # The mode of a folder that mkdir creates: mkdtemp's is for one user.
        partial.chmod(0o777 & ~_umask())
        if folder.is_dir():
            folder.rmdir()
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor on the CPU, in the order of its elements."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write_configuration(folder: Path, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> None:
    model.config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        # save_pretrained refuses combinations that published checkpoints have.
        model.generation_config.to_json_file(folder / GENERATION_CONFIG_NAME)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    # The weights are not those of the quantised checkpoint that the model was read from.
    path = folder / CONFIG
    config = json.loads(path.read_text(encoding="utf-8"))
    inputs, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    tied = outputs is not None and outputs.weight is inputs.weight
    for part in (config, *(value for value in config.values() if isinstance(value, dict))):
        for name in CONFIG_NAMES:
            part.pop(name, None)
        # transformers leaves weights apart that differ in a checkpoint, and does not change the config.
        if "tie_word_embeddings" in part:
            part["tie_word_embeddings"] = tied
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")


def _stored(name: str, weight: PackedWeight) -> StoredWeight:
    names = tuple(f"{name}:{part}" for part in range(len(weight.tensors)))
    order = None if weight.order is None else f"{name}:order"
    return StoredWeight(weight.form, names, weight.shape, order, weight.transposed)


def _tensors_of(
    weights: Mapping[str, PackedWeight], stored: Mapping[str, StoredWeight]
) -> Iterable[tuple[str, torch.Tensor]]:
    for name, item in stored.items():
        yield from zip(item.tensors, weights[name].tensors, strict=True)
        if item.order is not None:
            order = weights[name].order
            assert order is not None
            yield item.order, order


def _groups(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterable[dict[str, torch.Tensor]]:
    """The tensors of each file."""
    group: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if group and size + tensor.nbytes > FILE_BYTES:
            yield group
            group, size = {}, 0
        group[name] = tensor
        size += tensor.nbytes
    if group:
        yield group


def _write_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> StoredFile:
    """Write a safetensors file whose tensors begin at multiples of :data:`ALIGNMENT`.

    Source: the description of the format in the README of huggingface/safetensors. It allows spaces after the header,
    and no gaps between tensors.
    """
    # Sizes that are multiples of the alignment come first.
    names = sorted(tensors, key=lambda name: (tensors[name].nbytes % ALIGNMENT != 0, -tensors[name].itemsize))
    entries, end = {}, 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}, separators=(",", ":")).encode()
    header += b" " * (-(8 + len(header)) % ALIGNMENT)
    digests = {}
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for name in names:
            digests[name] = _write_tensor(file, tensors[name])
        file.flush()
        os.fsync(file.fileno())
    return StoredFile(8 + len(header) + end, hashlib.sha256(header).hexdigest(), digests)


def _write_tensor(file: BinaryIO, tensor: torch.Tensor) -> str:
    data = tensor_bytes(tensor)
    file.write(data)
    return hashlib.sha256(data).hexdigest()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

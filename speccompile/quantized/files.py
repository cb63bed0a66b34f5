"""The safetensors files of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from speccompile.errors import error_line
from speccompile.quantized.source import TensorSource

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
#: safetensors' names of dtypes that are not quantised.
FLOATS = ("F32", "F16", "BF16")
#: Dtypes of scales, of packed words, and of other integers.
SCALES = (torch.float32, torch.float16, torch.bfloat16)
WORDS = (torch.int32,)
INTEGERS = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)


class TensorFiles:
    """The tensors of a folder by name, from one file ``model.safetensors`` or several files with an index.

    Raises:
        UnsupportedCheckpoint: the folder only has weights of another kind.
        DamagedCheckpoint: a file is missing, truncated, or does not match the index.
    """

    def __init__(self, folder: Path, source: TensorSource) -> None:
        self._source = source
        self._files: dict[str, Any] = {}
        self.metadata: dict[str, str] = {}
        for path in _paths(folder, source):
            try:
                file = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise source.damaged(f"{path.name}: {error_line(error)}") from error
            self.metadata.update(file.metadata() or {})
            self._files.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def get(self, name: str, dtypes: tuple[torch.dtype, ...] = ()) -> torch.Tensor:
        """Read the tensor ``name``, which must have one of ``dtypes`` if any are given.

        Raises:
            DamagedCheckpoint: the tensor does not exist.
            UnsupportedCheckpoint: the tensor has another dtype.
        """
        if name not in self._files:
            raise self._source.damaged(f"it has no tensor {name}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if dtypes and tensor.dtype not in dtypes:
            read = ", ".join(map(str, dtypes))
            raise self._source.of(name).unsupported(f"it is {tensor.dtype}, and only {read} are read")
        return tensor

    def get_if_any(self, name: str, dtypes: tuple[torch.dtype, ...] = ()) -> torch.Tensor | None:
        return self.get(name, dtypes) if name in self._files else None

    def dtype(self, name: str) -> str:
        """Dtype of the tensor, by safetensors' name: ``I32``."""
        dtype: str = self._files[name].get_slice(name).get_dtype()
        return dtype


def _paths(folder: Path, source: TensorSource) -> list[Path]:
    index, single = folder / INDEX, folder / SINGLE
    if index.is_file():
        try:
            names = {folder / name for name in json.loads(index.read_text())["weight_map"].values()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise source.damaged(f"{index.name}: {error_line(error)}") from error
        return sorted(names)
    if single.is_file():
        return [single]
    if others := sorted(path.name for path in folder.glob("*.bin")):
        advice = "Save it anew with save_pretrained of a current transformers"
        raise source.unsupported(f"{others[0]} is a pickle, and only safetensors files are read", advice)
    raise source.damaged(f"it has no {SINGLE}")

"""Opens packed folders: tensors are mapped from the files, and processes share their pages."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from speccompile.errors import error_line
from speccompile.quantized.checkpoint import OnLookup
from speccompile.quantized.packed_manifest import Manifest, StoredFile, StoredWeight, packed_source, read_manifest
from speccompile.quantized.packed_weight import PackedWeight, PackedWeights
from speccompile.quantized.packed_writer import tensor_bytes


class PackedFolder:
    """The contents of a packed folder.

    Opening it compares sizes, the headers of the weights' files and all other files with the manifest.
    :meth:`verify` compares every tensor.

    Raises:
        DamagedCheckpoint: a file is missing, truncated or changed.
        UnsupportedCheckpoint: another version of the package wrote the folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.source = folder, packed_source(folder)
        self.manifest: Manifest = read_manifest(folder)
        self._files: dict[str, Any] = {}
        for name, stored in self.manifest.files.items():
            self._check(name, stored)
        for name, stored in self.manifest.files.items():
            if stored.tensors:
                self._files.update(dict.fromkeys(stored.tensors, self._opened(name)))

    @property
    def weights(self) -> PackedWeights:
        """The packed weights. Each is mapped when it is looked up."""
        readers = {name: partial(self._weight, stored) for name, stored in self.manifest.weights.items()}
        return PackedWeights(OnLookup(readers), self.manifest.format, self.manifest.digest)

    @property
    def others(self) -> Mapping[str, torch.Tensor]:
        """The model's other tensors, by name. Each is mapped when it is looked up."""
        packed = {
            part
            for stored in self.manifest.weights.values()
            for part in (*stored.tensors, *([stored.order] if stored.order is not None else []))
        }
        return OnLookup({name: partial(self._tensor, name) for name in self._files if name not in packed})

    def verify(self) -> int:
        """Compare every tensor with the manifest. Returns the number of tensors.

        Raises:
            DamagedCheckpoint: a tensor was changed; the error names the first.
        """
        count = 0
        for name, digest in self._digests():
            if hashlib.sha256(tensor_bytes(self._tensor(name))).hexdigest() != digest:
                raise self.source.of(name).damaged("its bytes were changed (its SHA-256 differs)")
            count += 1
        return count

    def _digests(self) -> Iterator[tuple[str, str]]:
        for stored in self.manifest.files.values():
            yield from stored.tensors.items()

    def _check(self, name: str, stored: StoredFile) -> None:
        path = self.folder / name
        if not path.is_file():
            raise self.source.damaged(f"it has no file {name}")
        if (size := path.stat().st_size) != stored.nbytes:
            raise self.source.damaged(f"{name} has {size} bytes, and was written with {stored.nbytes}")
        with path.open("rb") as file:
            if stored.tensors:
                digest = hashlib.sha256(file.read(int.from_bytes(file.read(8), "little"))).hexdigest()
            else:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != stored.header:
            part = "the header of " if stored.tensors else ""
            raise self.source.damaged(f"{part}{name} was changed (its SHA-256 differs)")

    def _opened(self, name: str) -> Any:
        try:
            return safe_open(self.folder / name, framework="pt")
        except (OSError, SafetensorError) as error:
            raise self.source.damaged(f"{name}: {error_line(error)}") from error

    def _tensor(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        return tensor

    def _weight(self, stored: StoredWeight) -> PackedWeight:
        tensors = tuple(map(self._tensor, stored.tensors))
        order = None if stored.order is None else self._tensor(stored.order)
        return PackedWeight(stored.form, tensors, stored.shape, order, stored.transposed)

"""The manifest of a packed folder: what it contains, and the hashes of all of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from speccompile.quantized.source import TensorSource

MANIFEST = "speccompile.json"
#: Version of the manifest and of the layout of packed weights. A change of either is a new version.
VERSION = 2


@dataclass(frozen=True)
class StoredWeight:
    """A packed weight of the folder.

    Args:
        form: name of its form.
        tensors: names of its tensors in the files, in the form's order.
        shape: that of the packed weight, ``(N, K)``, or ``(E, N, K)`` of experts.
        order: name of the tensor with the order of inputs; None if they keep their own.
        transposed: whether the model's weight has the last two dimensions in the other order.
    """

    form: str
    tensors: tuple[str, ...]
    shape: tuple[int, ...]
    order: str | None
    transposed: bool


@dataclass(frozen=True)
class StoredFile:
    """A file of the folder.

    Args:
        nbytes: its size.
        header: SHA-256 of what precedes the tensors of a safetensors file, or of the whole of any other file.
        tensors: SHA-256 of each tensor's bytes, by name.
    """

    nbytes: int
    header: str
    tensors: Mapping[str, str]


@dataclass(frozen=True)
class Manifest:
    """Everything that a packed folder contains.

    Args:
        format: what was packed, for ``explain()``.
        dtype: that of the model, by torch's name: ``"bfloat16"``.
        weights: packed weights, by names of the model's parameters.
        files: all files but the manifest, by name.
        head: name of the subfolder with a draft head, or None.
    """

    format: str
    dtype: str
    weights: Mapping[str, StoredWeight]
    files: Mapping[str, StoredFile]
    head: str | None = None

    def to_json(self) -> str:
        """Return the text of the file, with a hash of the text itself."""
        return json.dumps({**self._fields, "sha256": self.digest}, indent=1)

    @cached_property
    def digest(self) -> str:
        """Hash of all contents of the folder."""
        return _digest(self._fields)

    @property
    def _fields(self) -> dict[str, Any]:
        return {"version": VERSION, **asdict(self)}


def packed_source(folder: Path) -> TensorSource:
    """The folder as errors name it."""
    return TensorSource(str(folder), advice="Write the folder again with speccompile quantize")


def is_packed(folder: str | Path) -> bool:
    """Whether ``folder`` has packed weights."""
    return (Path(folder) / MANIFEST).is_file()


def packed_head(folder: str | Path) -> Path | None:
    """Return the folder of the draft head in a packed folder; None for other folders, and without a head."""
    head = read_manifest(Path(folder)).head if is_packed(folder) else None
    return None if head is None else Path(folder) / head


def read_manifest(folder: Path) -> Manifest:
    """Read the manifest of a packed folder.

    Raises:
        DamagedCheckpoint: the manifest is not the one that was written.
        UnsupportedCheckpoint: another version of the package wrote it.
    """
    source = packed_source(folder)
    try:
        fields: dict[str, Any] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        written, version = fields.pop("sha256"), fields["version"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise source.damaged(f"its {MANIFEST} cannot be read ({error!r})") from error
    if written != _digest(fields):
        raise source.damaged(f"its {MANIFEST} was changed (its SHA-256 differs)")
    if version != VERSION:
        reason = f"its packed weights have layout {version!r}, and this version of speccompile reads layout {VERSION}"
        raise source.unsupported(reason)
    weights = {
        name: StoredWeight(**{**item, "tensors": tuple(item["tensors"]), "shape": tuple(item["shape"])})
        for name, item in fields["weights"].items()
    }
    files = {name: StoredFile(**item) for name, item in fields["files"].items()}
    return Manifest(fields["format"], fields["dtype"], weights, files, fields["head"])


def _digest(fields: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

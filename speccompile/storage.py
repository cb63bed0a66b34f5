"""What need not be made twice, by name: files of the cache folder, or what a package brought along."""

from __future__ import annotations

import hashlib
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from speccompile.paths import cache_dir


class Storage(Protocol):
    """Names are paths with slashes, and hold a hash of all that the content depends on: nothing is ever replaced by
    something that means something else."""

    def read(self, name: str) -> bytes | None:
        """What is stored, or None when there is nothing or it is damaged."""

    def write(self, name: str, data: bytes) -> None: ...


@dataclass(frozen=True)
class CacheFolder:
    """Files in :func:`~speccompile.paths.cache_dir`, each with its checksum in front. It may be deleted at any time."""

    def path(self, name: str) -> Path:
        return cache_dir() / name

    def read(self, name: str) -> bytes | None:
        if not self.path(name).exists():
            return None
        checksum, _, data = self.path(name).read_bytes().partition(b"\n")
        return data if checksum == digest(data).encode() else None

    def write(self, name: str, data: bytes) -> None:
        """Store ``data``, whole or not at all; a folder that cannot be written costs the next start, not this one."""
        path = self.path(name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(digest(data).encode() + b"\n" + data)
            os.replace(file.name, path)
        except OSError as error:
            warnings.warn(
                f"{path.parent} cannot be written ({error.strerror}); the next wrap makes again what was to be stored "
                "there. Set SPECCOMPILE_CACHE to a folder that can be",
                stacklevel=2,
            )


@dataclass(frozen=True)
class Brought:
    """Files of a package, and behind them the cache folder."""

    files: Mapping[str, bytes] = field(repr=False)
    behind: CacheFolder = field(default_factory=CacheFolder)

    def read(self, name: str) -> bytes | None:
        return self.files[name] if name in self.files else self.behind.read(name)

    def write(self, name: str, data: bytes) -> None:
        self.behind.write(name, data)


@dataclass(frozen=True)
class Collected:
    """What is to be put into a package."""

    files: dict[str, bytes] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def write(self, name: str, data: bytes) -> None:
        self.files[name] = data


def digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()

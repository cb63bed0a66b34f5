"""Stored build results by name: files of the cache folder or of a package."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from speccompile.errors import Degraded
from speccompile.utils.paths import cache_dir
from speccompile.utils.warn import warn_caller

FOLDERS = ("captures", "checks", "compiled", "steps")
#: Unread files are deleted after this time.
RETENTION_SECONDS = 60 * 24 * 3600
#: Time between two searches for unread files. A search over thousands of files is slower than a small model's wrap.
SCAN_INTERVAL_SECONDS = 24 * 3600


class Storage(Protocol):
    """Storage of build results by name. Names are paths with slashes. They contain a hash of everything that the
    content depends on, so a name always has the same content."""

    def read(self, name: str) -> bytes | None:
        """Return the stored data; None if it does not exist or is damaged."""

    def write(self, name: str, data: bytes) -> None:
        """Store ``data`` under ``name``."""


@dataclass(frozen=True)
class CacheFolder:
    """Files in :func:`~speccompile.utils.paths.cache_dir`, each with its checksum. It may be deleted at any time."""

    def path(self, name: str) -> Path:
        """Return the path of the file for ``name``."""
        return cache_dir() / name

    def read(self, name: str) -> bytes | None:
        """Return the stored data; None if it does not exist."""
        spare = known_spare()
        data = _read(self.path(name))
        return _read(spare / name) if data is None and spare is not None else data

    def write(self, name: str, data: bytes) -> None:
        """Store ``data`` completely or not at all, in :func:`spare_dir` if the folder cannot be written."""
        try:
            _write(self.path(name), data)
        except OSError as error:
            spare = spare_dir(cache_dir(), error)
            if spare is not None:
                # On a full disk the data is lost: the next wrap builds it again.
                with contextlib.suppress(OSError):
                    _write(spare / name, data)

    def drop_unread(self) -> None:
        """Delete files that were not read for 60 days. Every version of a model, an option or this package leaves
        files."""
        now, mark = time.time(), self.path("looked-through")
        with contextlib.suppress(OSError):
            # A mark in the future comes from a wrong clock.
            if 0 <= now - mark.stat().st_mtime < SCAN_INTERVAL_SECONDS:
                return
        try:
            mark.touch()
        except OSError:
            # The folder does not exist, or none of its files can be deleted.
            return
        oldest = now - RETENTION_SECONDS
        for path in (path for folder in FOLDERS for path in self.path(folder).glob("*.*")):
            # Another process may delete it too, and a folder may be read-only.
            with contextlib.suppress(OSError):
                if path.stat().st_mtime < oldest:
                    path.unlink()


def _read(path: Path) -> bytes | None:
    try:
        checksum, _, data = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    if checksum != digest(data).encode():
        return None
    # The time of the last read decides when it is deleted.
    with contextlib.suppress(OSError):
        os.utime(path)
    return data


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        whole = Path(folder, path.name)
        whole.write_bytes(digest(data).encode() + b"\n" + data)
        os.replace(whole, path)


_spare: list[Path] = []


def known_spare() -> Path | None:
    """Return :func:`spare_dir` if this process has needed it, else None."""
    return _spare[0] if _spare else None


def spare_dir(folder: Path, error: OSError) -> Path | None:
    """Return a temporary folder of this process that replaces the cache ``folder``, which cannot be written. Return
    None if it cannot be created. The first call warns."""
    if not _spare:
        warn_caller(
            f"the cache folder {folder} cannot be written ({error.strerror}), so build results last only as long as "
            "this process, and every other process builds them again. Set SPECCOMPILE_CACHE to a folder that can be "
            "written, or to one that was filled by the same wrap",
            Degraded,
        )
        try:
            _spare.append(Path(tempfile.mkdtemp(prefix="speccompile-")))
        except OSError:
            return None
        remove_with_process(_spare[0])
    return _spare[0]


def remove_with_process(folder: Path) -> None:
    """Delete ``folder`` when this process ends. A forked child does not delete it."""
    atexit.register(_remove, folder, os.getpid())


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass(frozen=True)
class PackageStorage:
    """Files of a package, with the cache folder as fallback."""

    files: Mapping[str, bytes] = field(repr=False)
    fallback: CacheFolder = field(default_factory=CacheFolder)

    def read(self, name: str) -> bytes | None:
        """Return the package's data, else that of the fallback."""
        return self.files[name] if name in self.files else self.fallback.read(name)

    def write(self, name: str, data: bytes) -> None:
        """Store ``data`` in the fallback: packages are not changed."""
        self.fallback.write(name, data)


@dataclass(frozen=True)
class Collected:
    """Storage in memory that collects the files of a package that is being saved."""

    files: dict[str, bytes] = field(default_factory=dict, repr=False)

    def read(self, name: str) -> bytes | None:
        """Return the collected data; None if it does not exist."""
        return self.files.get(name)

    def write(self, name: str, data: bytes) -> None:
        """Keep ``data`` in memory."""
        self.files[name] = data


def digest(data: str | bytes) -> str:
    """Return the SHA-256 as hexadecimal digits."""
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()

"""The cache folder: whole files or none, and none for ever."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import speccompile
from speccompile.errors import Degraded
from speccompile.utils import storage
from speccompile.utils.storage import RETENTION_SECONDS, SCAN_INTERVAL_SECONDS, CacheFolder
from support.tiny import tiny_llama


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CacheFolder:
    monkeypatch.setattr("speccompile.utils.storage.cache_dir", lambda: tmp_path)
    return CacheFolder()


def age(path: Path) -> None:
    long_ago = time.time() - RETENTION_SECONDS - 60
    os.utime(path, (long_ago, long_ago))


def test_what_is_not_read_for_long_is_dropped(folder: CacheFolder) -> None:
    names = ["steps/read.json", "steps/unread.json", "captures/unread.json", "compiled/unread.bin", "other/unread.bin"]
    for name in names:
        folder.write(name, name.encode())
        age(folder.path(name))
    folder.write("steps/new.json", b"")
    assert folder.read("steps/read.json") == b"steps/read.json"
    folder.drop_unread()
    left = {str(path.relative_to(folder.path(""))) for path in folder.path("").glob("*/*")}
    # What is not of this kind (a model that was fetched, say) belongs to another library.
    assert left == {"steps/read.json", "steps/new.json", "other/unread.bin"}


def test_the_folder_is_looked_through_once_a_day(folder: CacheFolder) -> None:
    folder.write("steps/unread.json", b"")
    folder.drop_unread()
    age(folder.path("steps/unread.json"))
    folder.drop_unread()
    assert folder.path("steps/unread.json").exists()
    # Longer ago, or by a clock that was wrong.
    for looked in (time.time() - SCAN_INTERVAL_SECONDS - 60, time.time() + 3600):
        os.utime(folder.path("looked-through"), (looked, looked))
        folder.drop_unread()
        assert not folder.path("steps/unread.json").exists()
        folder.write("steps/unread.json", b"")
        age(folder.path("steps/unread.json"))
        folder.drop_unread()
        assert folder.path("steps/unread.json").exists()


def test_a_wrap_drops_what_no_wrap_reads(folder: CacheFolder) -> None:
    folder.write("steps/of_an_older_version.json", b"")
    age(folder.path("steps/of_an_older_version.json"))
    with speccompile.wrap(tiny_llama(), "none", tiers=(0,), max_len=16, backend="eager"):
        names = {path.name for path in folder.path("steps").iterdir()}
    assert names and "of_an_older_version.json" not in names


def test_what_cannot_be_read_is_not_there(folder: CacheFolder) -> None:
    folder.path("steps/folder.json").mkdir(parents=True)
    assert folder.read("steps/folder.json") is None


def test_a_failed_write_leaves_nothing(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.path("steps/in_the_way").mkdir(parents=True)
    monkeypatch.setattr("speccompile.utils.storage._spare", [])
    with pytest.warns(Degraded, match="every other process builds them again"):
        folder.write("steps/in_the_way", b"data")
    assert [path.name for path in folder.path("steps").iterdir()] == ["in_the_way"]


@pytest.fixture
def read_only(folder: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> CacheFolder:
    """As for a user who may not write there; the tests may run as one who may write everywhere."""
    folder.write("steps/warm", b"warm")
    write = storage._write

    def refused(path: Path, data: bytes) -> None:
        if path.is_relative_to(storage.cache_dir()):
            raise PermissionError(errno.EACCES, "Permission denied")
        write(path, data)

    monkeypatch.setattr(storage, "_write", refused)
    monkeypatch.setattr(storage, "_spare", [])
    return folder


def test_a_folder_that_is_read_only_is_read(read_only: CacheFolder, recwarn: pytest.WarningsRecorder) -> None:
    assert read_only.read("steps/warm") == b"warm"
    assert not recwarn


def test_what_a_read_only_folder_lacks_is_kept_for_the_process_with_one_warning(read_only: CacheFolder) -> None:
    with pytest.warns(Degraded, match=r"Permission denied.* Set SPECCOMPILE_CACHE") as warned:
        read_only.write("steps/cold", b"cold")
        read_only.write("captures/cold", b"other")
    assert len(warned) == 1
    assert (read_only.read("steps/cold"), read_only.read("captures/cold")) == (b"cold", b"other")
    assert read_only.read("steps/warm") == b"warm"
    assert not read_only.path("steps/cold").exists()


def test_a_folder_of_the_process_goes_with_it() -> None:
    code = (
        "from speccompile.utils.storage import spare_dir; from pathlib import Path; "
        "folder = spare_dir(Path('x'), OSError()); (folder / 'file').touch(); print(folder)"
    )
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() and not Path(run.stdout.strip()).exists()


def test_where_nothing_can_be_written_wraps_go_on(read_only: CacheFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(prefix: str) -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory")

    monkeypatch.setattr(storage.tempfile, "mkdtemp", none)
    with pytest.warns(Degraded):
        read_only.write("steps/cold", b"cold")
    assert read_only.read("steps/cold") is None

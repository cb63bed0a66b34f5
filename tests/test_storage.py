"""The cache folder: whole files or none, and none for ever."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
from tiny import tiny_llama

import speccompile
from speccompile.storage import KEPT_SECONDS, LEFT_ALONE_SECONDS, CacheFolder


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CacheFolder:
    monkeypatch.setattr("speccompile.storage.cache_dir", lambda: tmp_path)
    return CacheFolder()


def age(path: Path) -> None:
    long_ago = time.time() - KEPT_SECONDS - 60
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
    # What is not of this kind (a model that was fetched, say) is somebody else's.
    assert left == {"steps/read.json", "steps/new.json", "other/unread.bin"}


def test_the_folder_is_looked_through_once_a_day(folder: CacheFolder) -> None:
    folder.write("steps/unread.json", b"")
    folder.drop_unread()
    age(folder.path("steps/unread.json"))
    folder.drop_unread()
    assert folder.path("steps/unread.json").exists()
    # Longer ago, or by a clock that was wrong.
    for looked in (time.time() - LEFT_ALONE_SECONDS - 60, time.time() + 3600):
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


def test_a_failed_write_leaves_nothing(folder: CacheFolder) -> None:
    folder.path("steps/in_the_way").mkdir(parents=True)
    with pytest.warns(UserWarning, match="the next wrap makes again"):
        folder.write("steps/in_the_way", b"data")
    assert [path.name for path in folder.path("steps").iterdir()] == ["in_the_way"]

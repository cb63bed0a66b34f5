"""Inductor's cache folder where it cannot be written: a folder of the process replaces it."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from speccompile.errors import Degraded
from speccompile.utils import inductor_folder
from speccompile.utils.inductor_folder import (
    VARIABLE,
    make_inductor_folder_writable,
    replace_inductor_folder_after,
    replaced_inductor_folder,
    warn_of_lost_kernels,
)


@pytest.fixture
def warm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one kernel."""
    folder = tmp_path / "inductor"
    (folder / "ab").mkdir(parents=True)
    (folder / "ab" / "warm.so").write_text("warm")
    (folder / "ab" / "warm.lock").touch()
    monkeypatch.setenv(VARIABLE, str(folder))
    monkeypatch.setattr(inductor_folder, "_replacements", [])
    monkeypatch.setattr(inductor_folder.tempfile, "tempdir", str(tmp_path))
    return folder


@pytest.fixture
def read_only(warm: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As for a user who may not write there; the tests may run as one who may write everywhere."""
    attempt = inductor_folder._try

    def refused(folder: Path) -> None:
        if folder == warm:
            raise OSError(errno.EROFS, "Read-only file system")
        attempt(folder)

    monkeypatch.setattr(inductor_folder, "_try", refused)
    return warm


def test_a_folder_that_can_be_written_stays(warm: Path) -> None:
    make_inductor_folder_writable()
    assert os.environ[VARIABLE] == str(warm) and replaced_inductor_folder() is None
    assert [path.name for path in warm.iterdir()] == ["ab"]


def test_what_a_read_only_folder_has_is_used_without_a_warning(
    read_only: Path, recwarn: pytest.WarningsRecorder
) -> None:
    for _ in range(2):
        make_inductor_folder_writable()
    folder = Path(os.environ[VARIABLE])
    assert replaced_inductor_folder() == str(read_only) != str(folder)
    assert (folder / "ab" / "warm.so").read_text() == "warm"
    assert not (folder / "ab" / "warm.lock").exists(), "a lock must be a file of its own"
    warn_of_lost_kernels()
    assert not recwarn


def test_what_it_lacks_lasts_as_long_as_the_process_with_one_warning(read_only: Path) -> None:
    make_inductor_folder_writable()
    Path(os.environ[VARIABLE], "ab", "cold.so").touch()
    with pytest.warns(Degraded, match=rf"{read_only} cannot be written \(Read-only.* Set {VARIABLE}") as warned:
        for _ in range(2):
            warn_of_lost_kernels()
    assert len(warned) == 1


def test_a_folder_that_cannot_be_created_is_replaced(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(warm / "ab" / "warm.so" / "below"))
    make_inductor_folder_writable()
    assert Path(os.environ[VARIABLE]).is_dir()


@pytest.mark.parametrize(
    ("cause", "replaced"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), True),
        (OSError(errno.ENOENT, "No such file or directory"), False),
        (RuntimeError("C++ compile error: ld: final link failed: No space left on device"), True),
        (RuntimeError("C++ compile error: expected ';'"), False),
    ],
)
def test_a_disk_that_becomes_full_is_found_in_the_chain_of_errors(warm: Path, cause: Exception, replaced: bool) -> None:
    failure = RuntimeError("Inductor could not compile 'layer'")
    failure.__cause__ = cause
    assert replace_inductor_folder_after(failure) is replaced
    assert (replaced_inductor_folder() is not None) is replaced
    assert not replace_inductor_folder_after(failure), "another folder helps once"


def test_after_a_failed_write_the_folder_has_no_links(read_only: Path) -> None:
    """A compiler that the full disk stopped left parts of files, and would write through links to them."""
    make_inductor_folder_writable()
    linked = Path(os.environ[VARIABLE])
    assert replace_inductor_folder_after(OSError(errno.ENOSPC, "No space left on device"))
    folder = Path(os.environ[VARIABLE])
    assert folder != linked and list(folder.iterdir()) == []
    assert replaced_inductor_folder() == str(read_only)
    assert not replace_inductor_folder_after(OSError(errno.ENOSPC, "No space left on device"))


def test_where_nothing_can_be_written_the_folder_stays(warm: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(inductor_folder, "_try", full)
    make_inductor_folder_writable()
    assert os.environ[VARIABLE] == str(warm)

"""Files of the user: what cannot be read or written is an error that names the option."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from speccompile.cli.files import check_output_file, read_text
from speccompile.errors import InvalidOption
from support.errors import raises


def test_a_file_can_be_written_where_its_folder_exists(tmp_path: Path) -> None:
    check_output_file("--html", None)
    check_output_file("--html", tmp_path / "report.html")
    assert not list(tmp_path.iterdir()), "a check writes nothing"
    with raises(InvalidOption, name="--html", reason=re.compile("there is no folder .*create it")):
        check_output_file("--html", tmp_path / "nowhere" / "report.html")


def test_a_folder_without_permission_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom no permission stops.
    monkeypatch.setattr("speccompile.cli.files.os.access", lambda path, _: path != tmp_path)
    with raises(InvalidOption, name="--output", reason=re.compile("permission denied")):
        check_output_file("--output", tmp_path / "new")
    (tmp_path / "old").touch()
    check_output_file("--output", tmp_path / "old")


def test_a_file_that_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"\x89PNG")
    with raises(InvalidOption, name="--text", value=str(path), reason=re.compile("cannot be read as UTF-8 text")):
        read_text("--text", path)
    path.write_text("The sea is blue.", encoding="utf-8")
    assert read_text("--text", path) == "The sea is blue."

"""The guide "Publish a drafter", block after block, in an empty folder."""

from __future__ import annotations

import csv
import importlib.metadata
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.pages import ROOT

PAGE = "docs/guides/publishing.md"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the page leaves."""
    folder = tmp_path_factory.mktemp("publishing")
    scripts = folder / "scripts"
    scripts.mkdir()
    (scripts / "speccompile").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m speccompile "$@"\n')
    (scripts / "speccompile").chmod(0o755)
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": paths}
    found = re.findall(r"^```(\w+)\n(.*?)^```", (ROOT / PAGE).read_text(), re.MULTILINE | re.DOTALL)
    assert [language for language, _ in found] == ["python", "sh", "python", "sh", "sh", "toml"]
    for number, (language, text) in enumerate(found):
        if language == "toml":
            (folder / "pyproject.toml").write_text(text)
        elif number == 0:
            (folder / "period.py").write_text(text)
        else:
            command = [sys.executable, "-c", text] if language == "python" else ["sh", "-e", "-c", text]
            run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            assert run.returncode == 0, f"{text}\n{run.stdout}\n{run.stderr}"
    return folder


def test_the_table_has_every_drafter_with_equal_texts(folder: Path) -> None:
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = {name for row in rows for name in row.values() if name}
    assert {"period:Period K=3", "ngram K=3", "suffix K=3"} <= names
    answers = [json.loads(line) for line in (folder / "here.jsonl").read_text().splitlines()]
    texts: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    for answer in answers:
        if answer["kind"] == "answer":
            texts.setdefault((answer["prompt"], answer["turn"]), set()).add(tuple(answer["token_ids"]))
    assert len(texts) == 3 and all(len(each) == 1 for each in texts.values())


def test_the_replay_and_the_joined_page_are_there(folder: Path) -> None:
    replayed = json.loads((folder / "replay.json").read_text())
    assert "period:Period" in json.dumps(replayed)
    assert (folder / "page.html").stat().st_size > 10_000 < (folder / "joined.html").stat().st_size
    assert json.loads((folder / "joined.json").read_text())["machines"]


def test_the_entry_point_names_the_class(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["entry-points"]
    (group, points), *_ = declared.items()
    monkeypatch.syspath_prepend(folder)
    (loaded,) = [importlib.metadata.EntryPoint(name, value, group).load() for name, value in points.items()]
    assert group == "speccompile.modes" and loaded.name == "period"

"""A key of a user's object changes with every value and every piece of code that it may run."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from speccompile.passes import Changes, Pass, StepGraph, facts
from speccompile.utils.code_key import own_code_key
from speccompile.utils.stable_key import NoStableKey

MINE = """
from speccompile.passes import Changes, Pass, facts
{imports}


class Mine(Pass):
    name, looks_for, after = "mine", "rows", "bind_rows"
    requires, by = facts("rows"), 1.0

    def run(self, graph):
        {inside}
        return Changes(int(used()))


def used():
    return 1
"""


@pytest.fixture
def key_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., str]]:
    """The key of a pass whose module and helpers have these texts, in this process or as if in a new one."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: set[str] = set()

    def key(imports: str = "", inside: str = "pass", **helpers: str) -> str:
        for name in names:
            sys.modules.pop(name, None)
        for name, text in {"mine": MINE.format(imports=imports, inside=inside), **helpers}.items():
            file = tmp_path / f"{name.replace('__', '/').replace('INIT', '__init__')}.py"
            file.parent.mkdir(exist_ok=True)
            file.write_text(text)
            names.update({name, name.replace("__", ".")})
        importlib.invalidate_caches()
        return json.dumps(own_code_key(importlib.import_module("mine").Mine()))

    yield key
    for name in names:
        sys.modules.pop(name, None)


@pytest.mark.parametrize(
    ("imports", "inside"),
    [
        ("from settings import SCALE", "pass"),
        ("import settings", "pass"),
        ("", "from settings import SCALE"),
        ("import between", "pass"),
    ],
)
def test_files_that_its_module_imports_are_part_of_it(key_of: Callable[..., str], imports: str, inside: str) -> None:
    between = "from settings import SCALE"
    first = key_of(imports, inside, settings="SCALE = 1.0", between=between)
    assert first == key_of(imports, inside, settings="SCALE = 1.0", between=between)
    assert first != key_of(imports, inside, settings="SCALE = 100.0", between=between)


def test_relative_imports_are_followed(key_of: Callable[..., str]) -> None:
    texts = {"parts__INIT": "", "parts__first": "from . import second", "imports": "from parts import first"}
    assert key_of(**texts, parts__second="x = 1") != key_of(**texts, parts__second="x = 2")


def test_values_of_the_object_and_of_its_class_are_part_of_it(key_of: Callable[..., str]) -> None:
    first = key_of()
    item = sys.modules["mine"].Mine()
    vars(item)["by"] = 2.0
    assert json.dumps(own_code_key(item)) != first
    sys.modules["mine"].Mine.by = 2.0
    assert json.dumps(own_code_key(sys.modules["mine"].Mine())) != first


@dataclass(frozen=True, slots=True)
class Slotted(Pass):
    by: float = 1.0

    name, looks_for, after = "slotted", "rows", "bind_rows"
    requires = facts("rows")

    def run(self, graph: StepGraph) -> Changes:
        return Changes(1)


def test_values_in_slots_are_part_of_it() -> None:
    assert own_code_key(Slotted(1.0)) == own_code_key(Slotted(1.0)) != own_code_key(Slotted(2.0))


def made(run: Any) -> Pass:
    cls: type[Pass] = type("Own", (Pass,), {"name": "own", "looks_for": "rows", "after": "bind_rows", "run": run})
    return cls()


def test_classes_of_one_name_differ_by_their_methods() -> None:
    keys = [own_code_key(made(run)) for run in (lambda self, graph: Changes(1), lambda self, graph: Changes(2))]
    assert keys[0] != keys[1]


def test_a_closure_has_no_key() -> None:
    count = len(sys.argv)
    with pytest.raises(NoStableKey):
        own_code_key(made(lambda self, graph: Changes(count)))


def test_code_is_what_was_loaded(key_of: Callable[..., str], tmp_path: Path) -> None:
    """A file that was changed after its import has another key than the same file, imported."""
    key_of()
    item = sys.modules["mine"].Mine()
    file = tmp_path / "mine.py"
    changed = file.read_text().replace("return 1", "return 100")
    file.write_text(changed)
    loaded_before = json.dumps(own_code_key(item))
    del sys.modules["mine"]
    importlib.invalidate_caches()
    assert file.read_text() == changed
    assert loaded_before != json.dumps(own_code_key(importlib.import_module("mine").Mine()))


@pytest.mark.parametrize(
    ("imports", "read"), [("", "STEP"), ("import settings", "settings.STEP"), ("from settings import STEP", "STEP")]
)
def test_global_values_that_it_reads_are_part_of_it(key_of: Callable[..., str], imports: str, read: str) -> None:
    key_of(imports, f"self.step = {read}", settings="STEP = 1")
    module = sys.modules["mine"]
    holder = sys.modules["settings"] if read == "settings.STEP" else module
    keys = []
    for step in (1, 50, 1):
        vars(holder)["STEP"] = step
        keys.append(json.dumps(own_code_key(module.Mine())))
    assert keys[0] == keys[2] != keys[1]
    # What its code does not read does not matter, nor what has no key.
    vars(module).update(other=3, used=module.used)
    vars(holder)["STEP"] = object()
    own_code_key(module.Mine())

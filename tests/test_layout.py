"""The tests mirror the package's folders, and share code only by ``tests/support``."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "speccompile"
FILES = [path for path in TESTS.rglob("*.py") if "__pycache__" not in path.parts]
#: Folders that the package does not have: helpers, whole systems, and what lies beside the package.
OTHERS = {"support", "end_to_end", "benchmarks", "docs"}


def test_every_folder_of_tests_is_one_of_the_package() -> None:
    folders = {path.stem for path in PACKAGE.iterdir()}
    assert {path.name for path in TESTS.iterdir() if path.is_dir()} - {"__pycache__"} <= folders | OTHERS


def test_every_folder_of_the_package_has_a_folder_of_tests() -> None:
    """Where it has modules: one that only exports names of others, as ``heads``, has nothing to test."""
    folders = {path.parent.relative_to(PACKAGE) for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"}
    tested = {path.parent.relative_to(TESTS) for path in FILES if path.name.startswith("test_")}
    assert sorted(str(folder) for folder in folders - tested) == []


def test_file_names_are_unique() -> None:
    """pytest imports test modules by their names alone."""
    names = Counter(path.name for path in FILES if path.name != "conftest.py")
    assert not [name for name, count in names.items() if count > 1]


def test_no_class_name_of_the_package_exists_twice() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(f"{path.relative_to(PACKAGE)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_test_module_is_imported() -> None:
    tests = {path.stem for path in FILES if path.name.startswith(("test_", "check_")) or path.name == "conftest.py"}
    imported = []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            imported += [f"{path}:{node.lineno}" for name in names if name.split(".")[-1] in tests]
    assert not imported

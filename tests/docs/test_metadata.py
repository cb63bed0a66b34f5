"""What the wheel says of the package."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

import speccompile

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    fields: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return fields


def test_the_metadata_has_the_readme_keywords_and_classifiers(project: dict[str, Any]) -> None:
    assert project["readme"] == "README.md" and (ROOT / "README.md").is_file()
    assert project["keywords"] and "Typing :: Typed" in project["classifiers"]
    versions = [line.rpartition(" ")[2] for line in project["classifiers"] if line.startswith("Programming Language")]
    allowed = SpecifierSet(project["requires-python"])
    assert all(version == "3" or version in allowed for version in versions)


def test_the_version_is_written_once_more_and_alike(project: dict[str, Any]) -> None:
    assert project["version"] == speccompile.__version__


def test_the_readme_names_the_lowest_versions_that_are_required(project: dict[str, Any]) -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if "tested versions" in line)
    rows = dict(line.strip("| ").split(" | ") for line in lines[start + 2 : start + 5])
    for package in ("torch", "transformers"):
        (requirement,) = [item for item in project["dependencies"] if item.startswith(f"{package}>=")]
        assert rows[package].startswith(requirement.partition(">=")[2].partition(",")[0] + " to ")
    assert rows["Python"].startswith(project["requires-python"].removeprefix(">="))


def test_ci_runs_the_lowest_versions_that_are_required(project: dict[str, Any]) -> None:
    lowest = {
        name: requirement.partition(">=")[2].partition(",")[0]
        for name in ("torch", "transformers")
        for requirement in project["dependencies"]
        if requirement.startswith(f"{name}>=")
    }
    pair = f"TORCH={lowest['torch']} TRANSFORMERS={lowest['transformers']} "
    assert pair in (ROOT / ".ci" / "run").read_text()


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_it_is_bounded_right_after_the_last_version_that_is_tested(project: dict[str, Any], package: str) -> None:
    (row,) = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith(f"| {package} |")]
    major, minor = re.findall(r"(\d+)\.(\d+)", row)[-1]
    (requirement,) = [item for item in project["dependencies"] if item.startswith(f"{package}>=")]
    assert requirement.endswith(f",<{major}.{int(minor) + 1}")

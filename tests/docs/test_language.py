"""Documentation and code are written in plain technical English: words that the project's style avoids do not occur."""

from __future__ import annotations

from pathlib import Path

from support import code_prose
from support.pages import ROOT, pages
from support.plain_words import AVOIDED, found, prose

HELD = (
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "benchmarks/README.md",
    "heads/smollm2-135m-instruct/README.md",
    *pages(),
)


def test_pages_avoid_the_words_of_the_list() -> None:
    occurrences = [(page, *item) for page in HELD for item in found(ROOT / page)]
    assert not occurrences, [(page, number, name, AVOIDED[name]) for page, name, number, _ in occurrences]


def test_the_words_are_found_in_prose_alone(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("A `takes` b.\n\n    takes = 1\n\n```python\ntakes = 2\n```\n\nIt takes an int, so that it ends.\n")
    lines = [(number, AVOIDED[name]) for name, number, _ in found(page)]
    assert lines == [(9, "two sentences"), (9, "accepts, needs, copies")]
    assert len(prose(page.read_text()).splitlines()) == 9


def test_code_avoids_the_words_of_the_list() -> None:
    occurrences = [
        f"{path.relative_to(ROOT)}:{number}: {text} -> {code_prose.REMEDIES[name]}"
        for path in sorted((ROOT / "speccompile").rglob("*.py"))
        for name, number, text in code_prose.found(path)
    ]
    assert not occurrences, "\n".join(occurrences)


def test_names_avoid_the_words_of_the_list() -> None:
    files = sorted((ROOT / "speccompile").rglob("*.py"))
    assert not [(str(path.relative_to(ROOT)), *item) for path in files for item in code_prose.names(path)]


def test_the_words_are_found_in_names(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text("class TwinRoom:\n    def told(self, near_ear, room):\n        bearing = told_by = 1\n")
    found = sorted(code_prose.names(module))
    assert found == [("TwinRoom", 1), ("near_ear", 2), ("told", 2), ("told_by", 3)]


def test_the_words_are_found_in_docstrings_comments_and_messages(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        '"""What it is."""\n\n# It has to end.\ntold = "told"\nraise ValueError("a takes `told` b")\n'
        'note = "it is told here"\n#: What follows.\nkept = 1\n'
    )
    remedies = {**AVOIDED, **code_prose.IN_CODE, "opening": "an imperative"}
    found = [(line, remedies[name]) for name, line, _ in code_prose.found(module)]
    assert found == [
        (1, "an imperative"),
        (7, "an imperative"),
        (6, "reports, returns, raises, receives"),
        (5, "accepts, needs, copies"),
        (3, "must"),
    ]

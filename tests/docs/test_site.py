"""The site builds without a warning; it documents every public name, and no link of it is dead.

External links are listed in ``external_links.txt``. After a change write the file anew, and look at the new ones::

    python tests/docs/test_site.py
"""

from __future__ import annotations

import inspect
import re
import runpy
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from sphinx.util.inventory import InventoryFile

import speccompile
from speccompile import errors
from support.browser import browser
from support.pages import DOCS, ROOT, build_site, pages
from support.pictures import SCHEMES, WIDTHS, photographed

EXTERNAL = Path(__file__).with_name("external_links.txt")


class Links(HTMLParser):
    """The targets of a page's links and pictures, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.targets: list[str] = []
        self.anchors: set[str] = set()
        self.feed(file.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("href", "src") and value and tag in ("a", "img"):
                self.targets.append(value)
            elif name == "id" and value:
                self.anchors.add(value)


def links(site: Path) -> dict[Path, Links]:
    return {file: Links(file) for file in site.rglob("*.html")}


def external(found: dict[Path, Links]) -> list[str]:
    return sorted({to for page in found.values() for to in page.targets if to.startswith(("http://", "https://"))})


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site") / "html"
    assert build_site(folder) == 0, "warnings are above"
    return folder


@pytest.fixture(scope="module")
def inventory(site: Path) -> set[str]:
    found = InventoryFile.loads((site / "objects.inv").read_bytes(), uri="").data
    return {name for kind, names in found.items() if kind.startswith("py:") for name in names}


def test_every_page_is_reached_from_the_front_page(site: Path) -> None:
    reached = (site / "index.html").read_text()
    for page in pages():
        name = Path(page).relative_to("docs").with_suffix(".html")
        assert f'href="{name}"' in reached or page == "docs/index.md" or "reference/api/" in page, page


def test_every_public_name_is_documented(inventory: set[str]) -> None:
    """Of the classes and functions in ``tests/public_api.txt``; errors are in the error list."""
    text = (ROOT / "tests" / "public_api.txt").read_text()
    names = re.findall(r"^class ([\w.]+)$|^([\w.]+)\(", text, re.MULTILINE)
    ends = {name.rpartition(".")[2] for name in inventory}
    missing = [
        name for pair in names for name in pair if name and name not in inventory and canonical(name) not in inventory
    ]
    # Those that are reached through a speculator are listed by their class's name alone.
    assert not [name for name in missing if "." in name or name not in ends]


def canonical(name: str) -> str:
    """Where a class is defined, under which it is documented once."""
    value: Any = speccompile
    for part in name.split(".")[1:]:
        value = getattr(value, part)
    return f"{value.__module__}.{value.__qualname__}" if inspect.isclass(value) else name


def test_every_pass_is_listed(site: Path) -> None:
    text = (site / "architecture" / "passes.html").read_text()
    names = {kind.name for kind in runpy.run_path(str(DOCS / "_ext" / "pass_list.py"))["passes"]()}
    assert len(names) > 50 and not [name for name in names if f">{name}<" not in text]


def test_every_error_is_listed_with_a_message(site: Path, inventory: set[str]) -> None:
    classes = {value for value in vars(errors).values() if inspect.isclass(value) and issubclass(value, Exception)}
    assert {f"speccompile.errors.{value.__name__}" for value in classes} <= inventory
    text = (site / "reference" / "errors.html").read_text()
    assert "this speculator was closed; wrap the model again." in text and text.count(
        '<dl class="py exception">'
    ) == len(classes)


def test_no_internal_link_is_dead(site: Path) -> None:
    found = links(site)
    dead = []
    for file, page in found.items():
        for target in page.targets:
            path, _, anchor = target.partition("#")
            if "://" in target or target.startswith(("mailto:", "data:")):
                continue
            there = (file.parent / unquote(path)).resolve() if path else file
            if not there.exists() or (
                anchor and there.suffix == ".html" and unquote(anchor) not in found[there].anchors
            ):
                dead.append((file.relative_to(site), target))
    assert not dead


def test_the_front_page_fits_and_the_console_has_no_error(site: Path) -> None:
    with browser() as window:
        for width in WIDTHS:
            for scheme in SCHEMES:
                window.show((width, 900), scale=1, dark=scheme == "dark")
                window.driver.get((site / "index.html").as_uri())
                photographed(window, "docs", width, scheme)


def test_external_links_are_listed(site: Path) -> None:
    assert external(links(site)) == EXTERNAL.read_text().split()


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if build_site(Path(folder) / "html"):
            sys.exit(1)
        EXTERNAL.write_text("\n".join(external(links(Path(folder) / "html"))) + "\n")
    print(EXTERNAL.relative_to(ROOT))

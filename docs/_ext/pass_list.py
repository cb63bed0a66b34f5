"""The directive ``pass-list``: every pass of the package, with what it does and its facts, read from the classes.

``python docs/_ext/pass_list.py`` prints the list as Markdown; that needs no Sphinx.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import pkgutil
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from speccompile.passes.base import Pass

if TYPE_CHECKING:
    from docutils import nodes
    from sphinx.application import Sphinx

#: Packages with passes, and what their passes are for.
GROUPS = {
    "passes.target": "Over the captured model",
    "passes.step": "Of a step",
    "modes": "Of drafters",
    "acceptance": "Of acceptance rules",
    "passes.ranks": "Of sharded models",
}


def passes() -> list[type[Pass]]:
    """All passes that can run, in the order of their names."""
    for package in GROUPS:
        module = importlib.import_module(f"speccompile.{package}")
        for found in pkgutil.walk_packages(module.__path__, f"{module.__name__}."):
            importlib.import_module(found.name)
    kinds = {kind for kind in _subclasses(Pass) if kind.__module__.startswith("speccompile.")}
    runnable = [kind for kind in kinds if not inspect.isabstract(kind) and hasattr(kind, "name")]
    return sorted(runnable, key=lambda kind: (kind.name, kind.__name__))


def _subclasses(kind: type[Pass]) -> Iterator[type[Pass]]:
    for below in kind.__subclasses__():
        yield below
        yield from _subclasses(below)


def purpose(kind: type[Pass]) -> str:
    """The first sentence of the docstring, in Markdown."""
    first = re.split(r"(?<=[^.]\.)\s", " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split()), maxsplit=1)[0]
    return re.sub(r":\w+:`~?\.?([\w.]+)`", r"``\1``", first).replace("``", "`").replace("|", "\\|")


def facts(kind: type[Pass]) -> str:
    """What it requires, provides and invalidates."""
    words = (("requires", kind.requires), ("provides", kind.provides), ("invalidates", kind.invalidates))
    return "; ".join(f"{word} {', '.join(sorted(names))}" for word, names in words if names)


def markdown() -> str:
    lines = []
    for package, title in GROUPS.items():
        lines += [f"### {title}", "", "| pass | | facts |", "|---|---|---|"]
        own = [kind for kind in passes() if kind.__module__.startswith(f"speccompile.{package}.")]
        # Several classes of one name are forms of one pass, of which a pipeline has one.
        for name, forms in itertools.groupby(own, key=lambda kind: kind.name):
            kinds = list(forms)
            purposes = " ".join(dict.fromkeys(map(purpose, kinds)))
            lines.append(f"| `{name}` | {purposes} | {' or '.join(dict.fromkeys(map(facts, kinds)))} |")
        lines.append("")
    return "\n".join(lines)


def setup(app: Sphinx) -> dict[str, Any]:
    from sphinx.util.docutils import SphinxDirective

    class PassList(SphinxDirective):
        """The list, as sections of the page."""

        def run(self) -> list[nodes.Node]:
            for kind in passes():
                self.env.note_dependency(inspect.getfile(kind))
            return self.parse_text_to_nodes(markdown(), allow_section_headings=True)

    app.add_directive("pass-list", PassList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    print(markdown())

"""The directive ``error-list``: every class of ``speccompile.errors``, with what it means and a message of it.

The messages are those of ``tests/errors/messages.txt``, which a test compares with the classes.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from speccompile import errors

MESSAGES = Path(__file__).parents[2] / "tests" / "errors" / "messages.txt"
#: The bases first.
FILES = sorted(
    (file for file in Path(errors.__file__).parent.glob("*.py") if file.stem != "__init__"),
    key=lambda file: (file.stem != "base", file.stem),
)


def examples() -> dict[str, str]:
    """A message of each class."""
    found = {}
    for entry in re.split(r"\n\n(?=\w)", MESSAGES.read_text()):
        name, _, rest = entry.partition(" (")
        found[name] = textwrap.dedent(rest.partition("  example\n")[2]).strip()
    return found


def sections() -> list[tuple[str, list[str]]]:
    """The titles of the package's files, each with the names of its classes, in the order of ``FILES``."""
    found = []
    for module in (importlib.import_module(f"{errors.__name__}.{file.stem}") for file in FILES):
        names = re.findall(r"^class ([A-Z]\w+)\(", inspect.getsource(module), re.MULTILINE)
        found.append((inspect.cleandoc(module.__doc__).splitlines()[0].rstrip(".").replace("``", "`"), names))
    return found


def markdown() -> str:
    messages, lines = examples(), []
    for title, names in sections():
        lines += [f"## {title}", ""]
        for name in names:
            kind = getattr(errors, name)
            bases = ", ".join(base.__name__ for base in kind.__bases__)
            lines += [f":::{{py:exception}} speccompile.errors.{name}", f"Bases: `{bases}`", ""]
            if kind.__doc__ and kind.__doc__ != kind.__base__.__doc__:
                lines += [inspect.cleandoc(kind.__doc__).replace("``", "`"), ""]
            if name in messages and messages[name] != "{message}":
                lines += ["```text", messages[name], "```", ""]
            lines += [":::", ""]
    return "\n".join(lines)


class ErrorList(SphinxDirective):
    """The list, as sections of the page."""

    def run(self) -> list[nodes.Node]:
        for file in (MESSAGES, *FILES):
            self.env.note_dependency(str(file))
        return self.parse_text_to_nodes(markdown(), allow_section_headings=True)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("error-list", ErrorList)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""A report as one HTML file that loads nothing.

The data is JSON, compressed, in the page; the page's scripts decompress it (``DecompressionStream``, in browsers since
2023). Graphs are laid out by dagre, treemap, flame and trees by d3-hierarchy, and drawn by preact. These
libraries lie in ``assets/vendor``, with their licences.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from importlib.resources import files

from speccompile.report.data import Report

_VENDOR = ("dagre.js", "d3-hierarchy.js", "htm-preact.js")
#: In the order in which they use one another.
_SCRIPTS = (
    "format.js",
    "overview.js",
    "waterfall.js",
    "graph.js",
    "step.js",
    "kernels.js",
    "memory.js",
    "acceptance.js",
    "app.js",
)


def page(report: Report) -> str:
    """The text of the file."""
    title = f"{report.subject.model}, {report.subject.mode}: speccompile report"
    scripts = [*(f"vendor/{name}" for name in _VENDOR), *_SCRIPTS]
    parts = {
        "title": html.escape(title),
        "style": _asset("style.css"),
        "text": html.escape("\n".join(report.verdict)),
        "data": base64.b64encode(packed(report)).decode(),
        "scripts": "\n".join(f"<script>\n{_asset(name)}\n</script>" for name in scripts),
    }
    # The data and scripts may contain braces, so each place is filled once, from the template's own text.
    pieces = _asset("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def packed(report: Report) -> bytes:
    """The data of the page: JSON by gzip. The code of all stages is a table of lines, since stages have most of them in
    common; a text is a list of runs, first line and number of lines."""
    data, lines = report.as_json(), _Lines()
    for program in (data["model"], *(item for tier in data["tiers"] for item in (tier["program"], *tier["drafters"]))):
        for stage in program["stages"]:
            stage["python"], stage["diff"] = lines.runs(stage["python"]), lines.runs(stage["diff"])
    text = json.dumps({"lines": lines.all, "report": data}, separators=(",", ":"), allow_nan=False)
    return gzip.compress(text.encode(), mtime=0)


class _Lines:
    def __init__(self) -> None:
        self.all: list[str] = []
        self._places: dict[str, int] = {}

    def runs(self, text: str) -> list[int]:
        found: list[int] = []
        for line in text.split("\n"):
            place = self._places.get(line)
            if place is None:
                place = self._places[line] = len(self.all)
                self.all.append(line)
            if found and found[-2] + found[-1] == place:
                found[-1] += 1
            else:
                found += [place, 1]
        return found


def _asset(name: str) -> str:
    return (files("speccompile.report.render") / "assets" / name).read_text(encoding="utf-8")

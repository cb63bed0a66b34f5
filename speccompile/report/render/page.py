"""A report as one self-contained HTML file.

The page contains its data as compressed JSON. Its scripts decompress the data (``DecompressionStream``, in browsers
since 2023). dagre computes the layout of graphs, d3-hierarchy that of the treemap, the flame graph and trees, and
preact draws them. These libraries are in ``assets/vendor``, with their licences.
"""

from __future__ import annotations

import base64
import gzip
import html
import json
from collections.abc import Sequence
from importlib.resources import files

from speccompile.report.data import Report

_VENDOR = ("dagre.js", "d3-hierarchy.js", "htm-preact.js")
#: Scripts, each after those that it uses.
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
    """Text of the HTML file."""
    title = f"{report.subject.model}, {report.subject.mode}: speccompile report"
    scripts = [*(f"vendor/{name}" for name in _VENDOR), *_SCRIPTS]
    return fill(title, "\n".join(report.verdict), packed(report), [asset(name) for name in scripts])


def fill(title: str, text: str, data: bytes, scripts: Sequence[str]) -> str:
    """Text of an HTML file that loads nothing.

    Args:
        text: shown where scripts do not run.
        data: gzipped JSON, which the scripts read.
        scripts: texts of the scripts, each after those that it uses.
    """
    parts = {
        "title": html.escape(title),
        "style": asset("style.css"),
        "text": html.escape(text),
        "data": base64.b64encode(data).decode(),
        "scripts": "\n".join(f"<script>\n{script}\n</script>" for script in scripts),
    }
    # Data and scripts may contain braces. Only the marks of the template itself are replaced, each once.
    pieces = asset("page.html").split("{{")
    filled = [pieces[0]]
    for piece in pieces[1:]:
        name, _, rest = piece.partition("}}")
        filled += [parts[name], rest]
    return "".join(filled)


def packed(report: Report) -> bytes:
    """Data of the page: gzipped JSON.

    Stages have most of their lines in common, and the lines of all stages are stored once, in a table. A text is a list
    of runs: the first line and the number of lines.
    """
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


def asset(name: str) -> str:
    """Text of a file of ``assets``."""
    return (files("speccompile.report.render") / "assets" / name).read_text(encoding="utf-8")

"""A summary as one self-contained HTML file, with the style and the parts of :mod:`speccompile.report.render.page`."""

from __future__ import annotations

import gzip
import io
import json
from importlib.resources import files

from rich.console import Console

from speccompile.bench.summary import BenchSummary
from speccompile.bench.tables import tables_of
from speccompile.report.render.page import asset, fill

#: Characters of a line where scripts do not run.
_WIDTH = 160
_SHARED = ("vendor/htm-preact.js", "format.js")
_SCRIPTS = ("charts.js", "bench.js")


def bench_page(summary: BenchSummary) -> str:
    """Text of the HTML file."""
    own = files("speccompile.bench") / "assets"
    scripts = [*map(asset, _SHARED), *((own / name).read_text(encoding="utf-8") for name in _SCRIPTS)]
    data = json.dumps(summary.as_json(), separators=(",", ":"), allow_nan=False)
    title = f"{summary.settings['model']}: speccompile bench"
    return fill(title, _text(summary), gzip.compress(data.encode(), mtime=0), scripts)


def _text(summary: BenchSummary) -> str:
    console = Console(file=io.StringIO(), record=True, width=_WIDTH)
    for table in tables_of(summary):
        console.print(table)
    return console.export_text()

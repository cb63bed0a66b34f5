"""Links of pages to files of the repository that are part of a page of the site: they lead to that page.

On GitHub, and in a checkout, the same links lead to the files. A file that is on no page stays a download, and so
does code on the page of the link itself.
"""

from __future__ import annotations

import os
from pathlib import PurePosixPath
from typing import Any

from sphinx.application import Sphinx

#: Files of the repository, and the pages that include them.
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "heads/smollm2-135m-instruct/README.md": "head.md",
    "examples/quickstart.py": "examples.md",
    "examples/serving.py": "examples.md",
    "examples/custom_drafter.py": "extend/mode.md",
    "examples/custom_pass.py": "extend/pass.md",
    "examples/custom_rule.py": "extend/rule.md",
    "examples/custom_processor.py": "extend/processor.md",
}


def lead_to_pages(app: Sphinx, docname: str, source: list[str]) -> None:
    folder = PurePosixPath("docs") / PurePosixPath(docname).parent
    for file, page in PAGES.items():
        # A page of Markdown cannot be downloaded.
        if page == f"{docname}.md" and not file.endswith(".md"):
            continue
        there = os.path.relpath(file, folder)
        here = os.path.relpath(page, PurePosixPath(docname).parent)
        for end in (")", "#"):
            source[0] = source[0].replace(f"]({there}{end}", f"]({here}{end}")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("source-read", lead_to_pages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

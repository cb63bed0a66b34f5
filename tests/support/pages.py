"""The Markdown pages of the repository that are documentation, and their code."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages() -> list[str]:
    """All pages of the site, relative to the repository."""
    return sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)

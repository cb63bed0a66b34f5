"""The Markdown pages of the repository that are documentation, and their code."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def pages() -> list[str]:
    """All pages of the site, relative to the repository."""
    return sorted(str(page.relative_to(ROOT)) for page in DOCS.rglob("*.md"))


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def build_site(output: Path) -> int:
    """The exit code of ``make docs``. In its own process: autodoc leaves its own defaults in signatures."""
    trees = f"{output}-trees"
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-d", trees, str(DOCS), str(output)]
    return subprocess.run(command, check=False).returncode

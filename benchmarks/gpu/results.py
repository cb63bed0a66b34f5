"""One JSON file of all figures, which is whole at any time: what is cut short keeps what came before."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from filelock import FileLock

#: In the folder of a run.
NAME = "results.json"


class Results:
    """The file in ``folder``, to which several processes add."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / NAME

    def read(self) -> dict[str, Any]:
        """All that was added; empty before that."""
        found: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else {}
        return found

    def add(self, section: str, values: dict[str, Any]) -> None:
        """Add entries to a section, in the place of entries of the same names."""
        partial = self.file.with_suffix(".partial")
        with FileLock(self.file.with_suffix(".lock")):
            found = self.read()
            found.setdefault(section, {}).update(values)
            partial.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(partial, self.file)

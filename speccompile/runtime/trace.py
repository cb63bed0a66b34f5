"""A trace: what each step of a run was offered, accepted and took, as JSON lines.

The first line has the tiers and what they cost; every other line is one step, one entry a row.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Sequence
from typing import Any, TextIO

from speccompile.policies.base import Done
from speccompile.policies.costs import CostTable

FORMAT = 1


class Recorder:
    """Writes a trace while a run goes on. It may be closed by another thread than the one that steps; what cannot be
    written is not a fault of the run, and is reported when it is closed.

    Args:
        path: of a file that is overwritten.
        draft_lens: of the tiers.
        costs: of the tiers, if they were timed.
        ready: the drafter had proposed before a tier was chosen.

    Raises:
        OSError: it cannot be written.
    """

    def __init__(
        self, path: str | os.PathLike[str], draft_lens: Sequence[int], costs: CostTable | None, *, ready: bool
    ) -> None:
        self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115  open as long as the run goes on
        self._lock = threading.Lock()
        self._failed: OSError | None = None
        known = None if costs is None else costs.as_json()
        self._line({"format": FORMAT, "draft_lens": list(draft_lens), "costs": known, "ready": ready})

    def add(self, done: Done, offered: Sequence[int]) -> None:
        """One step; ``offered`` is the number of drafts of each row, also where the tier verifies fewer."""
        line: dict[str, Any] = {
            "k": done.draft_len,
            "requests": done.requests,
            "contexts": done.contexts,
            "offered": list(offered),
            "proposed": done.proposed,
            "accepted": done.accepted,
            "emitted": done.emitted,
            "ms": None if done.milliseconds is None else round(done.milliseconds, 4),
        }
        if any(done.scores):
            line["scores"] = [[round(score, 4) for score in scores] for scores in done.scores]
        with self._lock:
            if self._file.closed or self._failed is not None:
                return
            try:
                self._line(line)
            except OSError as error:
                self._failed = error

    def close(self) -> None:
        """Raises OSError if a step could not be written."""
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self._failed = self._failed or error
            if self._failed is not None:
                raise self._failed

    def _line(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data) + "\n")
        self._file.flush()

"""Traces: the offered drafts, the accepted drafts and the duration of each step of a run, as JSON lines.

The first line has the tiers and their costs. Every other line is one step, with one entry for each row. A trace with
tokens (:mod:`speccompile.runtime.token_trace`) has further entries, and can be replayed like any other.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from speccompile.policies.base import Done
from speccompile.policies.costs import CostTable

FORMAT = 2


class Recorder:
    """Writes a trace while a run continues. Another thread than the one that steps may close it. A failed write does
    not fail the run, and is raised at the end.

    Args:
        path: path of a file, which is overwritten.
        draft_lens: draft lengths of the tiers.
        costs: costs of the tiers, if they were timed.
        ready: whether the drafter proposes before a tier is chosen.
        about: further entries of the first line.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        draft_lens: Sequence[int],
        costs: CostTable | None,
        *,
        ready: bool,
        about: Mapping[str, Any] | None = None,
    ) -> None:
        self._file: TextIO = open(path, "w", encoding="utf-8")  # noqa: SIM115  open until the run ends
        self._lock = threading.Lock()
        self._failed: OSError | None = None
        known = None if costs is None else costs.as_json()
        head = {"format": FORMAT, "draft_lens": list(draft_lens), "costs": known, "ready": ready}
        self._line({**head, **(about or {})})

    def add(self, done: Done, offered: Sequence[int], more: Mapping[str, Any] | None = None) -> None:
        """Write one step.

        Args:
            offered: number of drafts of each row, also if the tier verifies fewer.
            more: further entries of its line.
        """
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
        if any(done.found):
            line["found"] = done.found
        line.update(more or {})
        with self._lock:
            if self._file.closed or self._failed is not None:
                return
            try:
                self._line(line)
            except OSError as error:
                self._failed = error

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: a step could not be written.
        """
        with self._lock:
            try:
                self._file.close()
            except OSError as error:
                self._failed = self._failed or error
            if self._failed is not None:
                raise self._failed

    def _line(self, data: dict[str, Any]) -> None:
        self._file.write(json.dumps(data, separators=(",", ":")) + "\n")
        self._file.flush()

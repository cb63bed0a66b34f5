"""Reading of the traces that :mod:`speccompile.runtime.trace` writes."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speccompile.errors import InvalidTrace
from speccompile.policies.base import Done
from speccompile.policies.costs import CostTable
from speccompile.runtime.trace import FORMAT


@dataclass(frozen=True)
class RecordedRun:
    """A recorded run.

    Args:
        offered: for each step and row, the number of drafts.
        costs: costs of its tiers, if they were timed.
    """

    draft_lens: tuple[int, ...]
    steps: tuple[Done, ...]
    offered: tuple[tuple[int, ...], ...]
    ready: bool
    costs: CostTable | None

    @property
    def censored(self) -> float:
        """Share of rows and steps whose verified drafts were all accepted although the drafter had more. The fate of
        these further drafts is unknown, and they count as wrong. A run of the largest tier has no such steps."""
        censored = total = 0
        for done, offered in zip(self.steps, self.offered, strict=True):
            for accepted, proposed, available in zip(done.accepted, done.proposed, offered, strict=True):
                censored += accepted == proposed < available
                total += 1
        return censored / total if total else 0.0


def read_trace(path: str | os.PathLike[str], draft_lens: Collection[int] | None = None) -> RecordedRun:
    """Read the file of a :class:`~speccompile.runtime.trace.Recorder`.

    Args:
        draft_lens: the tiers with which it will be replayed; None means its own.

    Raises:
        InvalidTrace: the file cannot be read, or was recorded with a smaller largest tier.
    """
    path = Path(path)

    def refuse(reason: str) -> InvalidTrace:
        return InvalidTrace(path=str(path), reason=reason)

    try:
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        head = lines[0]
        if head["format"] != FORMAT:
            raise refuse(f"it is of format {head['format']}, and only {FORMAT} is read")
        own = tuple(int(draft_len) for draft_len in head["draft_lens"])
        if own[:1] != (0,) or list(own) != sorted(set(own)):
            raise ValueError(f"its tiers {list(own)} do not rise from 0")
        costs = None if head["costs"] is None else CostTable.from_json(head["costs"])
        steps = tuple(_step(line, own) for line in lines[1:])
        offered = tuple(tuple(int(count) for count in line["offered"]) for line in lines[1:])
        ready = bool(head["ready"])
    except OSError as error:
        raise refuse(f"it cannot be opened ({error.strerror})") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise refuse(f"it is not a trace ({type(error).__name__}: {error})") from error
    if not steps:
        raise refuse("it has no steps")
    if not any(sum(done.emitted) for done in steps):
        raise refuse("no step of it emitted a token")
    if draft_lens is not None and max(draft_lens) > max(own):
        raise refuse(
            f"it was recorded with tiers {list(own)}, and has no drafts after the first {max(own)}; "
            f"the largest requested tier is {max(draft_lens)}"
        )
    return RecordedRun(own, steps, offered, ready, costs)


def _step(line: dict[str, Any], draft_lens: Collection[int]) -> Done:
    def whole(name: str) -> tuple[int, ...]:
        return tuple(int(value) for value in line[name])

    done = Done(
        int(line["k"]),
        whole("requests"),
        whole("contexts"),
        whole("proposed"),
        whole("accepted"),
        whole("emitted"),
        tuple(tuple(float(score) for score in scores) for scores in line.get("scores", ())),
        None if line["ms"] is None else float(line["ms"]),
        tuple(bool(value) for value in line.get("found", ())),
    )
    rows = len(done.requests)
    columns = (done.contexts, done.proposed, done.accepted, done.emitted, line["offered"])
    optional = (column for column in (done.scores, done.found) if column)
    if any(len(column) != rows for column in (*columns, *optional)):
        raise ValueError("a step's columns differ in length")
    counts = zip(done.emitted, done.accepted, done.proposed, strict=True)
    if done.draft_len not in draft_lens or any(
        not (0 <= emitted <= accepted + 1 and 0 <= accepted <= proposed <= done.draft_len)
        for emitted, accepted, proposed in counts
    ):
        raise ValueError("a step's counts contradict each other")
    return done

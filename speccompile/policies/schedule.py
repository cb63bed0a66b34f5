"""``schedule``: the draft length by the number of live rows, with lower or with upper bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from speccompile.errors import InvalidPolicy, shown
from speccompile.policies.options import check_whole


@dataclass(frozen=True)
class Schedule:
    """Draft length by the fewest live rows. ``schedule:1=7,4=3,8=0``: 7 from one row on, 3 from four, 0 from eight.

    TensorRT-LLM's ``draft_len_schedule`` had this meaning until its pull request 10860, which introduced that of
    :class:`ScheduleUpTo`.

    Args:
        steps: pairs (fewest live rows, K), ascending. The first is for one row.

    Raises:
        InvalidPolicy: ``steps`` are not such pairs.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_pairs(self.steps)
        starts = [rows for rows, _ in self.steps]
        if starts != sorted(set(starts)):
            raise InvalidPolicy(policy=str(self), reason="its row counts must ascend")
        if starts[:1] != [1]:
            raise InvalidPolicy(policy=str(self), reason="it has no entry for one row; begin with 1=K")

    def choose(self, live_rows: int) -> int:
        """Return the draft length of the last bound that ``live_rows`` has reached."""
        reached = [draft_len for rows, draft_len in self.steps if rows <= live_rows]
        return reached[-1]

    @property
    def draft_lens(self) -> frozenset[int]:
        """Every draft length that it can choose."""
        return frozenset(draft_len for _, draft_len in self.steps)

    def __str__(self) -> str:
        return "schedule:" + ",".join(f"{rows}={draft_len}" for rows, draft_len in self.steps)


@dataclass(frozen=True)
class ScheduleUpTo:
    """Draft length by the most live rows. ``schedule:<=4=7,<=8=3``: 7 up to four live rows, 3 up to eight, 0 above.

    TensorRT-LLM's ``draft_len_schedule`` has this meaning: ``{4: 7, 8: 3}`` there equals the schedule above.

    Args:
        steps: pairs (most live rows, K), ascending.

    Raises:
        InvalidPolicy: ``steps`` are not such pairs.

    Source: TensorRT-LLM, ``get_draft_len_for_batch_size`` in ``tensorrt_llm/_torch/speculative/utils.py``.
    """

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        _check_pairs(self.steps)
        ends = [rows for rows, _ in self.steps]
        if ends != sorted(set(ends)):
            raise InvalidPolicy(policy=str(self), reason="its row counts must ascend")
        if not ends or ends[0] < 1:
            raise InvalidPolicy(policy=str(self), reason="begin with <=ROWS=K for a number of rows of at least 1")

    def choose(self, live_rows: int) -> int:
        """Return the draft length of the first bound that ``live_rows`` does not exceed, 0 after the last."""
        return next((draft_len for rows, draft_len in self.steps if live_rows <= rows), 0)

    @property
    def draft_lens(self) -> frozenset[int]:
        """Every draft length that it can choose."""
        return frozenset({0, *(draft_len for _, draft_len in self.steps)})

    def __str__(self) -> str:
        return "schedule:" + ",".join(f"<={rows}={draft_len}" for rows, draft_len in self.steps)


def _check_pairs(steps: Any) -> None:
    """Raise InvalidPolicy unless ``steps`` are pairs of a row count and a draft length."""
    pairs = isinstance(steps, tuple | list) and all(isinstance(step, tuple | list) and len(step) == 2 for step in steps)
    if not pairs:
        raise InvalidPolicy(policy="schedule", reason=f"steps={shown(steps)} must be pairs of (rows, K)")
    for rows, draft_len in steps:
        check_whole("schedule", "rows", rows, 0)
        check_whole("schedule", "a draft length", draft_len, 0)

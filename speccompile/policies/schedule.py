"""``schedule``: the draft length by the number of live rows, as TensorRT-LLM's ``draft_len_schedule``."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.errors import InvalidPolicy
from speccompile.policies.options import check_whole


@dataclass(frozen=True)
class Schedule:
    """Draft length by the number of live rows: of ``steps`` (rows, K), the largest rows that is reached counts."""

    steps: tuple[tuple[int, int], ...]

    def __post_init__(self) -> None:
        pairs = isinstance(self.steps, tuple | list) and all(
            isinstance(step, tuple | list) and len(step) == 2 for step in self.steps
        )
        if not pairs:
            raise InvalidPolicy(policy="schedule", reason=f"steps={self.steps!r} has to be pairs of (rows, K)")
        for rows, draft_len in self.steps:
            check_whole("schedule", "rows", rows, 0)
            check_whole("schedule", "a draft length", draft_len, 0)
        starts = [rows for rows, _ in self.steps]
        if starts != sorted(set(starts)):
            raise InvalidPolicy(policy=str(self), reason="its row counts do not rise")
        if starts[:1] != [1]:
            raise InvalidPolicy(policy=str(self), reason="it does not say what one row uses; begin with 1=K")

    def choose(self, live_rows: int) -> int:
        reached = [draft_len for rows, draft_len in self.steps if rows <= live_rows]
        return reached[-1]

    def __str__(self) -> str:
        return "schedule:" + ",".join(f"{rows}={draft_len}" for rows, draft_len in self.steps)

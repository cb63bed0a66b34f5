"""``schedule``: the draft length by the number of live rows, as TensorRT-LLM's ``draft_len_schedule``."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Schedule:
    """Draft length by the number of live rows: of ``steps`` (rows, K), the largest rows that is reached counts."""

    steps: tuple[tuple[int, int], ...]

    def choose(self, live_rows: int) -> int:
        reached = [draft_len for rows, draft_len in self.steps if rows <= live_rows]
        return reached[-1]

    def __str__(self) -> str:
        return "schedule:" + ",".join(f"{rows}={draft_len}" for rows, draft_len in self.steps)

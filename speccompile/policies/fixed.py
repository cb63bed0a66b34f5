"""``fixed``: always the same draft length."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fixed:
    """``fixed:7``."""

    draft_len: int

    def choose(self, live_rows: int) -> int:
        return self.draft_len

    def __str__(self) -> str:
        return f"fixed:{self.draft_len}"

"""``fixed``: always the same draft length."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.policies.options import check_whole


@dataclass(frozen=True)
class Fixed:
    """``fixed:7``."""

    draft_len: int

    def __post_init__(self) -> None:
        check_whole("fixed", "draft_len", self.draft_len, 0)

    def choose(self, live_rows: int) -> int:
        """``draft_len``, whatever the rows."""
        return self.draft_len

    def __str__(self) -> str:
        return f"fixed:{self.draft_len}"

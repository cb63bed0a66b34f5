"""A policy for tests of what may not depend on the draft length."""

from __future__ import annotations

import random
from collections.abc import Sequence


class Dice:
    """Asks for any tier at any step, and remembers which."""

    def __init__(self, draft_lens: Sequence[int], seed: int = 0) -> None:
        self._rng, self._draft_lens = random.Random(seed), draft_lens
        self.asked: list[int] = []

    def choose(self, live_rows: int) -> int:
        self.asked.append(self._rng.choice(self._draft_lens))
        return self.asked[-1]

"""Expected acceptance of a tree of drafts relative to a chain, learnt while steps run."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: First guess of a branching tree's gain: all drafts of a depth are wrong with the probability that so many independent
#: first drafts are.
FIRST_GAIN = 1.7
#: Change by one observation, and pull back to the first guess at each observation.
STEP, PULL = 0.03, 0.0005
LEAST, MOST = 0.8, 5.0


class TreeGain:
    """Gain g of each depth. If the draft of a chain is right with probability p, some node of the tree is right with
    probability ``1 - (1 - p) ** g``. Observations of chains thus apply to trees, and the reverse.

    Args:
        depth, branches: of the tree. The gain of a tree without branches stays 1.
    """

    def __init__(self, depth: int, branches: int) -> None:
        self.depth = depth
        self._learns = branches > 1
        self._first = math.log(FIRST_GAIN) if self._learns else 0.0
        self._logs = [self._first] * depth

    def share(self, position: int, share: float) -> float:
        """Probability at a depth (from 0 on), given the chain's probability ``share``."""
        return 1.0 - (1.0 - min(share, 1.0)) ** math.exp(self._logs[position])

    def shares(self, shares: Sequence[float]) -> list[float]:
        """Probabilities at all depths, given those of a chain."""
        return [self.share(position, share) for position, share in enumerate(shares[: self.depth])]

    def note(self, position: int, share: float, hit: bool) -> None:
        """Record whether a draft of that depth was right. ``share`` is the chain's probability there."""
        if self._learns:
            expected = self.share(position, share)
            log = self._logs[position] + STEP * (hit - expected)
            log += PULL * (self._first - log)
            self._logs[position] = min(max(log, math.log(LEAST)), math.log(MOST))

"""What a tree of drafts is worth, beside a chain: learnt while steps run."""

from __future__ import annotations

import math
from collections.abc import Sequence

#: Of a tree that branches, before anything was seen: its drafts of a depth are wrong as seldom as so many independent
#: first drafts all are.
FIRST_GAIN = 1.7
#: What an observation changes, and what pulls back to the first guess at each.
STEP, PULL = 0.03, 0.0005
LEAST, MOST = 0.8, 5.0


class TreeGain:
    """Of each depth a gain g: where the one draft of a chain is right with the chance p, some node of the tree is with
    ``1 - (1 - p) ** g``. So what is seen of chains tells about trees, and the other way around.

    Args:
        depth, branches: of the tree. One that does not branch is a chain, and stays one.
    """

    def __init__(self, depth: int, branches: int) -> None:
        self.depth = depth
        self._learns = branches > 1
        self._first = math.log(FIRST_GAIN) if self._learns else 0.0
        self._logs = [self._first] * depth

    def share(self, position: int, share: float) -> float:
        """The chance at a depth (from 0 on), of that of a chain."""
        return 1.0 - (1.0 - min(share, 1.0)) ** math.exp(self._logs[position])

    def shares(self, shares: Sequence[float]) -> list[float]:
        """The same of all depths."""
        return [self.share(position, share) for position, share in enumerate(shares[: self.depth])]

    def note(self, position: int, share: float, hit: bool) -> None:
        """A draft of that depth was right, or all were wrong; ``share`` of a chain's would have been right."""
        if self._learns:
            expected = self.share(position, share)
            log = self._logs[position] + STEP * (hit - expected)
            log += PULL * (self._first - log)
            self._logs[position] = min(max(log, math.log(LEAST)), math.log(MOST))

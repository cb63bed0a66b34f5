"""A clock that only moves when a tier runs: what is timed by it depends on no machine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from speccompile.lowering.tier import Tier
from speccompile.runtime import measure


class SimulatedClock:
    """Stands for the ``time`` of :mod:`speccompile.runtime.measure`. Tiers run as ever, and take what ``seconds`` says
    of them. One with a split drafter takes that of both: ``Tier.run_target`` runs each."""

    def __init__(self, seconds: Callable[[Tier], float], patch: pytest.MonkeyPatch) -> None:
        self._now = 0.0
        run = Tier.run_target

        def timed(tier: Tier) -> None:
            run(tier)
            self._now += seconds(tier)

        patch.setattr(Tier, "run_target", timed)
        patch.setattr(measure, "time", self)

    def perf_counter(self) -> float:
        """Seconds since it was made."""
        return self._now

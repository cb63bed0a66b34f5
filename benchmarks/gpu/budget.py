"""Time that is shared out: what does not fit any more is reported as not measured."""

from __future__ import annotations

import contextlib
import gc
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

#: Where a part leaves its figures as it goes, so that what it has when its time is up is kept.
Figures = dict[str, Any]

# Seconds that writing the report takes, at most.
_RESERVE = 3.0


class OutOfTime(BaseException):
    """Raised in the middle of a part. It is no ``Exception``, so that no handler there catches it."""


class NotMeasured(Exception):
    """A part lacks the result of another part, which reports the reason."""


@dataclass(frozen=True)
class Part:
    """One thing to measure.

    Args:
        least: seconds without which it is not begun.
        most: seconds after which it is cut short.
    """

    name: str
    least: float
    most: float
    run: Callable[[Figures], None]


class Budget:
    """Seconds until everything has to be over."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds - _RESERVE

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        """Raises OutOfTime inside of the block when its seconds, or all that are left, are over."""

        def stop(*_: object) -> None:
            raise OutOfTime

        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, max(0.001, min(seconds, self.left)))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


def measure(parts: Sequence[Part], budget: Budget, save: Callable[[dict[str, Figures]], None]) -> dict[str, Figures]:
    """Run the parts in order; ``save`` receives all figures after each.

    A part that fails or does not fit says so under ``not measured``, beside what it had found. The others go on.
    """
    measured: dict[str, Figures] = {}
    for part in parts:
        figures: Figures = {}
        measured[part.name] = figures
        started = time.monotonic()
        if budget.left < part.least:
            figures["not measured"] = f"{budget.left:.0f} s were left, and it needs {part.least:.0f} s"
        else:
            try:
                with budget.limit(part.most):
                    part.run(figures)
            except OutOfTime:
                figures["not measured"] = "cut short: its time was over"
            except NotMeasured as error:
                figures["not measured"] = str(error)
            except Exception as error:
                traceback.print_exc()
                figures["failed"] = figures["not measured"] = f"{type(error).__name__}: {error}".splitlines()[0]
            # What a failed part held on the device is not to be missing for the next one.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
        figures["seconds"] = time.monotonic() - started
        save(measured)
    return measured

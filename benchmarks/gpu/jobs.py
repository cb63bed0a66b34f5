"""Processes within a budget of seconds: one that fails or is cut short leaves the results of the others."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.machine import revision
from benchmarks.gpu.results import Results

# From an interrupt to the end by force: pytest prints what it has.
_GRACE_SECONDS = 10.0
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Job:
    """One process.

    Args:
        command: receives the time at which it must end, in seconds since 1970, and returns the arguments.
        least: seconds without which it is not begun.
        most: seconds after which it is interrupted.
        timed: whether it measures times, and so runs alone. Jobs in a row that do not run side by side.
    """

    name: str
    command: Callable[[float], Sequence[str]]
    least: float
    most: float
    timed: bool = True


def run_jobs(jobs: Sequence[Job], output: Path, until: float, tell: Callable[[str], None], side_by_side: int) -> bool:
    """Run ``jobs`` in order, until ``until`` seconds since 1970. Returns whether all that were begun ended well.

    A job prints to its own file in ``output`` (:func:`log_of`), which is passed to ``tell`` when it has ended. Its
    outcome is added to the results then. Of jobs that are not timed, at most ``side_by_side`` run at once.
    """
    results, well, code = Results(output), True, revision()
    for together in _steps(jobs):
        for job, outcome in _run(together, output, until, side_by_side):
            results.add("jobs", {job.name: outcome | {"revision": code}})
            well = well and ("seconds" not in outcome or outcome["outcome"] == "ended")
            log = log_of(job.name, output)
            if log.exists():
                tell(log.read_text(errors="replace").rstrip())
            tell(f"{job.name}: {outcome['outcome']}, {outcome.get('seconds', 0.0):.0f} s")
    return well


def log_of(name: str, output: Path) -> Path:
    """The file of all that the job prints."""
    return output / f"{re.sub(r'[^a-z0-9]+', '-', name)}.log"


def _steps(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that run side by side."""
    steps: list[list[Job]] = []
    for job in jobs:
        if steps and not job.timed and not steps[-1][0].timed:
            steps[-1].append(job)
        else:
            steps.append([job])
    return steps


def _run(jobs: Sequence[Job], output: Path, until: float, side_by_side: int) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Each of ``jobs`` and its outcome, as soon as it is over."""
    waiting, running = list(jobs), dict[Job, _Running]()
    with contextlib.ExitStack() as stack:
        while waiting or running:
            while waiting and len(running) < side_by_side:
                job = waiting.pop(0)
                left = until - time.time()
                if left < job.least:
                    reason = f"not begun: {left:.0f} s were left, and it needs {job.least:.0f} s"
                    yield job, {"outcome": reason}
                else:
                    running[job] = stack.enter_context(_Running(job, output, min(left, job.most)))
            for job in [job for job, process in running.items() if process.is_over()]:
                yield job, running.pop(job).outcome()
            time.sleep(_POLL_SECONDS)


class _Running:
    """A process that has begun, and is ended with the ``with``."""

    def __init__(self, job: Job, output: Path, seconds: float) -> None:
        self._seconds, self._started, self._cut = seconds, time.monotonic(), False
        self._taken: float | None = None
        with log_of(job.name, output).open("wb") as log:
            self._process = subprocess.Popen(
                job.command(time.time() + seconds),
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"PYTHONUNBUFFERED": "1"},
                start_new_session=True,
            )

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *_: object) -> None:
        # Also when this process is interrupted, and children that it left.
        self._signal(signal.SIGKILL)

    def is_over(self) -> bool:
        """Whether it has ended. One whose time is over is interrupted, and killed if it does not end."""
        taken = time.monotonic() - self._started
        if self._process.poll() is None and taken >= self._seconds and not self._cut:
            self._cut = True
            self._signal(signal.SIGINT)
        if self._process.poll() is None and taken >= self._seconds + _GRACE_SECONDS:
            self._signal(signal.SIGKILL)
            self._process.wait()
        if self._taken is None and self._process.poll() is not None:
            self._taken = taken
        return self._taken is not None

    def outcome(self) -> dict[str, Any]:
        """The way in which it ended, and its seconds."""
        outcome = "ended" if self._process.poll() == 0 else f"failed with exit code {self._process.poll()}"
        if self._cut:
            outcome = f"cut short after {self._seconds:.0f} s"
        return {"outcome": outcome, "seconds": self._taken}

    def _signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

"""Processes that follow one another within a budget of seconds: none takes the others' results along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.results import Results

#: In the folder of a run: what all processes print.
LOG = "log.txt"
# From an interrupt to the end by force: pytest prints what it has.
_GRACE_SECONDS = 10.0


@dataclass(frozen=True)
class Job:
    """One process.

    Args:
        command: receives the time at which it must end, in seconds since 1970, and returns the arguments.
        least: seconds without which it is not begun.
        most: seconds after which it is interrupted.
    """

    name: str
    command: Callable[[float], Sequence[str]]
    least: float
    most: float


def run_jobs(jobs: Sequence[Job], output: Path, until: float, tell: Callable[[str], None]) -> bool:
    """Run ``jobs`` in order, until ``until`` seconds since 1970; whether all ended well.

    What each prints is appended to the log and passed to ``tell`` when it has ended; its outcome is added to the
    results.
    """
    results, well = Results(output), True
    for job in jobs:
        left = until - time.time()
        if left < job.least:
            outcome: dict[str, Any] = {"outcome": f"not begun: {left:.0f} s were left, and it needs {job.least:.0f} s"}
        else:
            outcome = _run(job, output / LOG, min(left, job.most), tell)
        well = well and outcome["outcome"] == "ended"
        results.add("jobs", {job.name: outcome})
        tell(f"{job.name}: {outcome['outcome']}, {outcome.get('seconds', 0.0):.0f} s")
    return well


def _run(job: Job, log: Path, seconds: float, tell: Callable[[str], None]) -> dict[str, Any]:
    started = time.monotonic()
    with log.open("ab") as file:
        file.write(f"\n=== {job.name}\n".encode())
        file.flush()
        begin = file.tell()
        process = subprocess.Popen(
            job.command(time.time() + seconds),
            stdout=file,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            code = process.wait(seconds)
            outcome = "ended" if code == 0 else f"failed with exit code {code}"
        except subprocess.TimeoutExpired:
            _end(process)
            outcome = f"cut short after {seconds:.0f} s"
        finally:
            # Also when this process is interrupted.
            _signal(process, signal.SIGKILL)
    with log.open("rb") as file:
        file.seek(begin)
        tell(file.read().decode(errors="replace").rstrip())
    return {"outcome": outcome, "seconds": time.monotonic() - started}


def _end(process: subprocess.Popen[bytes]) -> None:
    _signal(process, signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_GRACE_SECONDS)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    """To the process and its children, if any of them is left."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)

"""``python -m benchmarks.gpu``: tests and measurements on a GPU, what matters most first.

Each file of tests and each model that is measured has a process: an illegal access makes the context of its process
useless for good.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks.gpu.gpu_tests import GpuTests, gpu_tests
from benchmarks.gpu.jobs import Job, run_jobs
from benchmarks.gpu.plan import GROUPS, Group

_HANG_SECONDS = 90


def main(
    output: Annotated[Path, typer.Option(help="The folder for results.json and a log of each job.")] = Path(
        "build/gpu-check"
    ),
    seconds: Annotated[float, typer.Option(help="For all together.")] = 525.0,
    only: Annotated[str, typer.Option(help="Names of jobs or of kinds, separated by semicolons.")] = "",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="A tiny model on the CPU: whether all of it runs.")
    ] = False,
) -> None:
    """Test and measure on a GPU. Without one, all parts run on the CPU with a tiny model, and their figures mean
    nothing. Exits with 1 if a job failed or was cut short; one for which no time is left is named."""
    if not rehearse and not torch.cuda.is_available():
        typer.echo("No CUDA GPU was found: this is a rehearsal on the CPU. Its figures mean nothing.")
        rehearse = True
    # What ends this process, as `timeout` does, must end its jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output.mkdir(parents=True, exist_ok=True)
    jobs = all_jobs(output, rehearse)
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    unknown = [name for name in wanted if not any(is_chosen(job, [name]) for job in jobs)]
    if unknown:
        names = "; ".join(job.name for job in jobs)
        raise typer.BadParameter(f"unknown jobs {unknown}; choose from: {names}", param_hint="--only")
    chosen = [job for job in jobs if is_chosen(job, wanted)]
    if not run_jobs(chosen, output, time.time() + seconds, typer.echo, os.cpu_count() or 1):
        raise typer.Exit(1)


def all_jobs(output: Path, rehearse: bool) -> list[Job]:
    """In the order of their worth: first whether sequences are right and how fast K=0 is, then all tests side by side,
    then the rest."""
    measurements = [_measurement(group, output, rehearse) for group in GROUPS]
    first = [job for job in measurements if job.name == "first" or not job.timed]
    return [*first, *map(_test, gpu_tests()), *(job for job in measurements if job not in first)]


def is_chosen(job: Job, wanted: Sequence[str]) -> bool:
    """Whether ``wanted`` has the job, or those of its kind: ``rounded`` for ``rounded, int8``."""
    return not wanted or any(f"{job.name}, ".startswith(f"{name}, ") for name in wanted)


def _measurement(group: Group, output: Path, rehearse: bool) -> Job:
    def command(until: float) -> Sequence[str]:
        arguments = [group.name, "--output", str(output), "--until", str(until), *(["--rehearse"] if rehearse else [])]
        return [sys.executable, "-m", "benchmarks.gpu.group", *arguments]

    return Job(group.name, command, group.least, group.most, group.timed)


def _test(tests: GpuTests) -> Job:
    options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "-o", f"faulthandler_timeout={_HANG_SECONDS}"]
    options += ["-k", tests.selected] if tests.selected else []
    return Job(tests.name, lambda until: [sys.executable, "-m", "pytest", *options, tests.path], 20, 180, timed=False)


if __name__ == "__main__":
    typer.run(main)

"""``python -m benchmarks.gpu``: tests and measurements on a GPU, what matters most first, a process for each group."""

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

from benchmarks.gpu.jobs import Job, run_jobs
from benchmarks.gpu.plan import GROUPS, Group

_GRAPHS = "tests/lowering/cuda/test_cuda_graphs.py"
_SEQUENCES = "tests/end_to_end/on_gpu"
#: The tests that need a GPU: kernels against their references, sequences, graphs by mode, and sequences of every mode.
#: Files, and which of their tests.
TESTS: dict[str, tuple[Sequence[str], str]] = {
    "test kernels": (["tests/ops/triton/on_gpu"], ""),
    "test sequences": ([f"{_SEQUENCES}/test_gpu_texts.py", f"{_SEQUENCES}/test_gpu_recurrent_texts.py"], ""),
    "test graphs, none": ([_GRAPHS], "none"),
    "test graphs, ngram": ([_GRAPHS], "ngram"),
    "test graphs, other": ([_GRAPHS], "not none and not ngram"),
    "test modes": ([_SEQUENCES], "not gpu_texts and not gpu_recurrent_texts"),
}
_PROCESSES = 8
_HANG_SECONDS = 90


def main(
    output: Annotated[Path, typer.Option(help="The folder for results.json and a log of each job.")] = Path(
        "build/gpu-check"
    ),
    seconds: Annotated[float, typer.Option(help="For all together.")] = 525.0,
    only: Annotated[str, typer.Option(help="Names of jobs, separated by semicolons; empty is all.")] = "",
    rehearse: Annotated[
        bool, typer.Option("--rehearse", help="A tiny model on the CPU: whether all of it runs.")
    ] = False,
) -> None:
    """Test and measure on a GPU. Without one, all parts run on the CPU with a tiny model, and their figures mean
    nothing. Exits with 1 if a job failed or was cut short."""
    if not rehearse and not torch.cuda.is_available():
        typer.echo("No CUDA GPU was found: this is a rehearsal on the CPU. Its figures mean nothing.")
        rehearse = True
    # What ends this process, as `timeout` does, must end its jobs.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    output.mkdir(parents=True, exist_ok=True)
    jobs = all_jobs(output, rehearse)
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    unknown = set(wanted) - {job.name for job in jobs}
    if unknown:
        names = ", ".join(job.name for job in jobs)
        raise typer.BadParameter(f"unknown jobs {sorted(unknown)}; choose from: {names}", param_hint="--only")
    chosen = [job for job in jobs if not wanted or job.name in wanted]
    if not run_jobs(chosen, output, time.time() + seconds, typer.echo):
        raise typer.Exit(1)


def all_jobs(output: Path, rehearse: bool) -> list[Job]:
    """In the order of their worth: first whether sequences are right and how fast K=0 is, then all tests side by side,
    then the rest."""
    first, texts, *others = [_measurement(group, output, rehearse) for group in GROUPS]
    return [first, texts, *[_tests(name, *given) for name, given in TESTS.items()], *others]


def _measurement(group: Group, output: Path, rehearse: bool) -> Job:
    def command(until: float) -> Sequence[str]:
        arguments = [group.name, "--output", str(output), "--until", str(until), *(["--rehearse"] if rehearse else [])]
        return [sys.executable, "-m", "benchmarks.gpu.group", *arguments]

    return Job(group.name, command, group.least, group.most, group.timed)


def _tests(name: str, paths: Sequence[str], selected: str) -> Job:
    """A process for each file: an illegal access makes the context of its process useless for good."""

    def command(until: float) -> Sequence[str]:
        files = sum(len(list(Path(path).glob("test_*.py"))) or 1 for path in paths)
        processes = min(files, _PROCESSES, os.cpu_count() or 1)
        options = ["-v", "-m", "gpu", "-p", "no:cacheprovider", "-n", str(processes), "--dist", "loadfile"]
        options += ["-o", f"faulthandler_timeout={_HANG_SECONDS}", *(["-k", selected] if selected else [])]
        return [sys.executable, "-m", "pytest", *options, *paths]

    return Job(name, command, 20, 180, timed=False)


if __name__ == "__main__":
    typer.run(main)

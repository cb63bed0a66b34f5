"""Printed stages run on their own: each file loads the ops that it calls."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import speccompile
import speccompile.lowering.stage_ops
from speccompile.compiler.frontend import build_stages
from speccompile.errors import LoweringError
from speccompile.graph.keys import Kind
from support.errors import raises
from support.plans import planned
from support.tiny import tiny_llama

RUN_ALL = """
import runpy, sys

for path in sys.argv[1:]:
    print("file", path, flush=True)
    runpy.run_path(path, run_name="__main__")
"""

KINDS: list[tuple[str, Kind]] = [("ngram", "sampled"), ("suffix", "greedy")]


def printed_stages(mode: str, kind: Kind) -> Iterator[tuple[str, str]]:
    """Every stage of every tier and prefill width over the C++ ops: its place and its text."""
    model = tiny_llama()
    plan = planned(model, mode, tiers=(0, 3), max_len=31, backend="inductor")
    config = replace(plan.config, kernels=plan.config.kernels.settled())
    assert config.kernels.native
    built = build_stages(model, plan.info, config, kind=kind)
    steps = [*built.tiers.values(), *built.prefill.values()]
    stages = {id(stage): stage for step in steps for stage in step.stages.values()}
    for stage in stages.values():
        yield f"{mode}, {kind}: {stage.name} of {stage.tier}", stage.python


def loads(text: str) -> tuple[str, ...]:
    """The statements of a printed stage outside of its functions, which are all that it loads."""
    return tuple(re.findall(r"^(?:import|from|speccompile).*$", text, re.MULTILINE))


def test_every_printed_stage_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    # Files that load the same share a process, since what one of them lacks all of them lack.
    groups: dict[tuple[str, ...], list[Path]] = {}
    for mode, kind in KINDS:
        for place, text in printed_stages(mode, kind):
            path = tmp_path / (re.sub(r"\W+", "-", place) + ".py")
            assert not path.exists()
            path.write_text(text)
            groups.setdefault(loads(text), []).append(path)
    assert len(groups) == 2, "with the C++ ops and without"
    for paths in groups.values():
        run = subprocess.run(
            [sys.executable, "-c", RUN_ALL, *map(str, paths)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert run.returncode == 0, run.stdout.splitlines()[-1:] + run.stderr.splitlines()[-3:]
        assert run.stdout.count("file ") == len(paths)


def test_every_module_that_defines_ops_is_imported() -> None:
    package = Path(speccompile.__file__).parent
    files = [
        file for file in package.rglob("*.py") if re.search(r"^(@|\w+ = )?define\(", file.read_text(), re.MULTILINE)
    ]
    defining = {".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files}
    assert len(defining) > 20
    # Other tests import more, so a new process does.
    program = "import sys, speccompile.lowering.stage_ops; print(*sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert defining <= set(run.stdout.split())


def test_a_stage_names_the_reason_when_the_compiled_ops_cannot_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.lowering.stage_ops.load_cpu_ops", lambda *_: "no C++ compiler was found")
    with raises(LoweringError, reason="no C++ compiler was found"):
        speccompile.lowering.stage_ops.load_compiled()

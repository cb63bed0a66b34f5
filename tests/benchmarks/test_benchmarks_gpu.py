"""The GPU check, on a CPU: every part runs, and what fails or does not fit leaves the results before it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.gpu.__main__ import all_jobs, is_chosen, main
from benchmarks.gpu.budget import Budget, Figures, Part, measure
from benchmarks.gpu.by_hand import ByHand
from benchmarks.gpu.gpu_tests import gpu_tests
from benchmarks.gpu.group import main as measure_group
from benchmarks.gpu.jobs import Job, log_of, run_jobs
from benchmarks.gpu.plan import GROUPS
from benchmarks.gpu.report import tables
from benchmarks.gpu.results import Results
from benchmarks.gpu.shapes import LLAMA_8B, SMOLLM2, TINY, Shape, make_model
from speccompile.lowering.backends import Eager
from speccompile.lowering.cuda.captures import Captures
from support.cuda_standin import StandIn

ROOT = Path(__file__).parents[2]
#: Its weights are rounded by compiled C++ ops, which takes half a minute; ``make gpu-check`` rehearses it.
COMPILED = ("rounded, int8", "rounded, int4")


@pytest.mark.parametrize("group", [group.name for group in GROUPS if group.name not in COMPILED])
def test_every_part_runs_on_a_tiny_model_over_graphs_of_the_stand_in(
    group: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StandIn()
    monkeypatch.setattr(Eager, "captures", lambda self, arena, weights: Captures(arena, device, weights))
    measure_group(group, tmp_path, time.time() + 300, rehearse=True)
    assert bool(device.graphs) == any(name.endswith("wrap") for name in Results(tmp_path).read()["parts"])
    found = Results(tmp_path).read()
    assert not any("failed" in figures for figures in found["parts"].values())
    missing = {figures["not measured"] for figures in found["parts"].values() if "not measured" in figures}
    assert missing <= {"a CPU runs no kernels of a GPU", "a CPU has no device memory"}
    assert found["settings"]["large"]["name"] == "tiny" and found["machine"]["versions"]["torch"] == torch.__version__
    out = capsys.readouterr().out
    if group == "first":
        assert [(case["rows"], case["K"]) for case in found["parts"]["tiny: steps"]["cases"]] == [(1, 0), (1, 1)]
        assert all(case["equal"] == "2 of 2" for case in found["parts"]["tiny: texts"]["cases"])
        assert found["parts"]["tiny: swaps"]["same_addresses"] is True
        assert "of the floor's speed" in out and "tokens/s" in out
    if group.startswith("texts"):
        cases = [case for figures in found["parts"].values() for case in figures.get("cases", [])]
        assert len(cases) == {"none": 1, "ngram": 5, "early_exit": 5}[group.removeprefix("texts, ")] and all(
            case["equal"] == "2 of 2" and case["steps"] for case in cases
        )
    if group.startswith("loops"):
        assert len(found["parts"][f"tiny, {group}: loops"]["loops"]) == 5
        assert "compiled loop by hand" in out


def test_without_a_gpu_it_is_a_rehearsal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    seen: list[str] = []

    def noted(jobs: list[Job], *_: object) -> bool:
        seen.extend(part for job in jobs for part in job.command(time.time()))
        return True

    monkeypatch.setattr("benchmarks.gpu.__main__.run_jobs", noted)
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["--output", str(tmp_path), "--only", "first"], catch_exceptions=False)
    assert result.exit_code == 0 and "this is a rehearsal on the CPU" in result.output
    assert "--rehearse" in seen
    unknown = CliRunner().invoke(app, ["--output", str(tmp_path), "--only", "frist"])
    assert unknown.exit_code == 2 and "frist" in unknown.output


def test_the_first_job_is_the_first_group_and_all_tests_are_run(tmp_path: Path) -> None:
    names = [job.name for job in all_jobs(tmp_path, rehearse=True)]
    assert names[0] == "first" and len(set(names)) == len(names)
    assert set(names) == {group.name for group in GROUPS} | {tests.name for tests in gpu_tests()}
    marked = {path for path in (ROOT / "tests").rglob("test_*.py") if "pytest.mark.gpu" in path.read_text()}
    run = {Path(tests.path) for tests in gpu_tests()}
    assert marked - run == {Path(__file__)}, "a test for a GPU is in none of the jobs"


def test_a_name_chooses_a_job_or_all_of_its_kind(tmp_path: Path) -> None:
    jobs = all_jobs(tmp_path, rehearse=True)
    assert [job.name for job in jobs if is_chosen(job, ["rounded", "loops, small"])] == [
        "rounded, bfloat16",
        "rounded, int8",
        "rounded, int4",
        "loops, small",
    ]
    assert [job for job in jobs if is_chosen(job, [])] == jobs
    assert not any(is_chosen(job, ["round"]) for job in jobs)


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_what_a_killed_job_had_is_kept_and_the_next_one_runs(tmp_path: Path) -> None:
    add = f"from pathlib import Path; from benchmarks.gpu.results import Results; Results(Path({str(tmp_path)!r})).add"
    slow = f"{add}('parts', {{'a': {{'value': 1}}}}); print('begun', flush=True); import time; time.sleep(60)"
    jobs = [
        Job("slow", lambda until: python(slow), 0, 8),
        Job("broken", lambda until: python("raise SystemExit(3)"), 0, 20),
        Job("large", lambda until: python("print('never')"), 1000, 2000),
        Job("fine", lambda until: python(f"{add}('parts', {{'b': {{'value': 2}}}})"), 0, 20),
    ]
    told: list[str] = []
    assert not run_jobs(jobs, tmp_path, time.time() + 100, told.append, 1)
    found = Results(tmp_path).read()
    assert found["parts"] == {"a": {"value": 1}, "b": {"value": 2}}
    outcomes = {name: job["outcome"] for name, job in found["jobs"].items()}
    assert outcomes["slow"].startswith("cut short after 8 s") and outcomes["broken"] == "failed with exit code 3"
    assert "it needs 1000 s" in outcomes["large"] and outcomes["fine"] == "ended"
    assert log_of("slow", tmp_path).read_text().startswith("begun\n")
    assert any(text.startswith("begun") for text in told)
    assert not log_of("large", tmp_path).exists()
    assert json.loads(Results(tmp_path).file.read_text()) == found


def test_jobs_that_measure_no_times_run_side_by_side(tmp_path: Path) -> None:
    """Each waits for the other's file."""
    jobs = []
    for own, other in (("a", "b"), ("b", "a")):
        code = (
            f"import time; from pathlib import Path; folder = Path({str(tmp_path)!r}); (folder / {own!r}).touch()\n"
            f"while not (folder / {other!r}).exists(): time.sleep(0.01)"
        )
        jobs.append(Job(own, lambda until, code=code: python(code), 0, 60, timed=False))  # type: ignore[misc]
    assert run_jobs(jobs, tmp_path, time.time() + 100, lambda text: None, 2)


def test_each_of_them_has_its_own_seconds(tmp_path: Path) -> None:
    jobs = [
        Job("short", lambda until: python("pass"), 0, 60, timed=False),
        Job("long", lambda until: python("import time; time.sleep(4)"), 0, 60, timed=False),
    ]
    assert run_jobs(jobs, tmp_path, time.time() + 100, lambda text: None, 2)
    seconds = {name: job["seconds"] for name, job in Results(tmp_path).read()["jobs"].items()}
    assert seconds["short"] + 2 < seconds["long"]


def test_at_most_so_many_run_at_once_and_each_is_told_when_it_ends(tmp_path: Path) -> None:
    """The second begins when the first is cut short."""
    stubborn = (
        "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('begun', flush=True); time.sleep(60)"
    )
    jobs = [
        Job("stubborn", lambda until: python(stubborn), 0, 2, timed=False),
        Job("next", lambda until: python("pass"), 0, 20, timed=False),
    ]
    told: list[str] = []
    assert not run_jobs(jobs, tmp_path, time.time() + 100, told.append, 1)
    assert [text.partition(":")[0] for text in told if ": " in text] == ["stubborn", "next"]
    found = Results(tmp_path).read()["jobs"]
    assert found["stubborn"]["outcome"] == "cut short after 2 s" and found["next"]["outcome"] == "ended"


def test_the_loop_by_hand_is_the_models_own_text() -> None:
    model = make_model(TINY, torch.device("cpu"), torch.float32, 40)
    ids = torch.randint(1, TINY.vocab, (2, 9), generator=torch.Generator().manual_seed(3))
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert torch.equal(ByHand(model, 2, 40, backend="eager").generate(ids, 12), wanted)
    assert len(set(wanted[0, 9:].tolist())) > 2


@pytest.mark.parametrize(("shape", "millions"), [(SMOLLM2, 134.5), (LLAMA_8B, 8030.3)])
def test_shapes_have_the_published_sizes(shape: Shape, millions: float) -> None:
    model = make_model(shape, torch.device("meta"), torch.bfloat16, 64)
    parameters = {id(weight): weight.numel() for weight in model.parameters()}
    assert round(sum(parameters.values()) / 1e6, 1) == millions
    assert model.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32


def test_what_does_not_fit_is_reported() -> None:
    def fine(figures: Figures) -> None:
        figures["value"] = 1

    def slow(figures: Figures) -> None:
        figures["value"] = 2
        while True:
            time.sleep(0.01)

    def broken(figures: Figures) -> None:
        raise ValueError("no such luck")

    shown: list[list[str]] = []
    parts = [
        Part("copy bandwidth", 0, 5, fine),
        Part("a: wrap", 0, 0.2, slow),
        Part("b: wrap", 0, 5, broken),
        Part("c: wrap", 1000, 2000, fine),
    ]
    measured = measure(parts, Budget(60), lambda so_far: shown.append(list(so_far)))
    assert measured["copy bandwidth"]["value"] == 1 and "not measured" not in measured["copy bandwidth"]
    # What it had found by then is kept.
    assert measured["a: wrap"]["value"] == 2 and "cut short" in measured["a: wrap"]["not measured"]
    assert measured["b: wrap"]["failed"] == "ValueError: no such luck"
    assert "it needs 1000 s" in measured["c: wrap"]["not measured"]
    assert [len(names) for names in shown] == [1, 2, 3, 4]
    console = Console(width=120, record=True)
    console.print(*tables(measured))
    assert console.export_text().count("cut short") == 1


def test_the_gpu_tests_need_no_hypothesis() -> None:
    """A machine with a GPU has torch, triton, transformers and pytest; the tests are collected there all the same."""
    program = (
        "import importlib.abc, sys, pytest\n"
        "class Without(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name.partition('.')[0] == 'hypothesis':\n"
        "            raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
        "options = ['--collect-only', '-q', '-m', 'gpu', '-p', 'no:hypothesispytest', '-p', 'no:cacheprovider']\n"
        "sys.exit(pytest.main([*options, 'tests']))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr

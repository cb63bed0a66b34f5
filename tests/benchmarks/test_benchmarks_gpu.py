"""The GPU benchmark, on the CPU: all of it runs, and what does not fit is reported."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.gpu.__main__ import main
from benchmarks.gpu.budget import Budget, Figures, Part, measure
from benchmarks.gpu.by_hand import ByHand
from benchmarks.gpu.report import tables
from benchmarks.gpu.shapes import LLAMA_8B, SMOLLM2, TINY, make_model


def test_everything_runs_on_a_tiny_model(tmp_path: Path) -> None:
    import typer

    app = typer.Typer()
    app.command()(main)
    file = tmp_path / "gpu.json"
    result = CliRunner().invoke(app, ["--smoke", "--json", str(file)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    parts = json.loads(file.read_text())["parts"]
    failed = {name: figures["not measured"] for name, figures in parts.items() if "not measured" in figures}
    assert failed == {"small (tiny): memory": "there is no device memory"}
    assert [(case["rows"], case["K"]) for case in parts["large (tiny): steps"]["cases"]] == [
        *[(1, 0), (1, 1), (2, 0), (2, 1)]
    ]
    assert all(case["floor_milliseconds"] > 0 for case in parts["large (tiny): steps"]["cases"])
    assert parts["large (tiny): swaps"]["same_addresses"] is True
    assert len(parts["large (tiny): loops"]["loops"]) == 5
    for text in ("of the floor's speed", "compiled loop by hand", "low again", "there is no device memory"):
        assert text in result.output


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import typer

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 2 and "no CUDA GPU was found" in result.output


def test_the_loop_by_hand_is_the_models_own_text() -> None:
    model = make_model(TINY, torch.device("cpu"), torch.float32, 40)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(7)
    ids = torch.randint(1, TINY.vocab, (2, 9), generator=torch.Generator().manual_seed(3))
    wanted = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert torch.equal(ByHand(model, 2, 40, backend="eager").generate(ids, 12), wanted)
    assert len(set(wanted[0, 9:].tolist())) > 2


@pytest.mark.parametrize(("shape", "millions"), [(SMOLLM2, 134.5), (LLAMA_8B, 8030.3)])
def test_shapes_have_the_published_sizes(shape, millions: float) -> None:  # type: ignore[no-untyped-def]
    model = make_model(shape, torch.device("meta"), torch.bfloat16, 64)
    parameters = {id(weight): weight.numel() for weight in model.parameters()}
    assert round(sum(parameters.values()) / 1e6, 1) == millions
    assert model.dtype is torch.bfloat16 and torch.get_default_dtype() is torch.float32


def test_what_does_not_fit_is_told() -> None:
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
    assert measured["b: wrap"]["not measured"] == "ValueError: no such luck"
    assert "it needs 1000 s" in measured["c: wrap"]["not measured"]
    assert [len(names) for names in shown] == [1, 2, 3, 4]
    console = Console(width=120, record=True)
    console.print(*tables(measured))
    assert console.export_text().count("cut short") == 1

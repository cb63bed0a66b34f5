"""``speccompile demo``: its tables, and the line that states what to choose."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from speccompile.cli import demo as demo_module
from speccompile.cli.demo_tables import show_categories, show_table
from speccompile.cli.measure import TRANSFORMERS, Run
from speccompile.cli.models import tiny_model
from speccompile.cli.prompts import BUILT_IN, NamedPrompt
from speccompile.heads import Eagle3Head, save_eagle3
from support.commands import QUICK, call


def test_demo_ends_with_the_verdict(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("abcabcabc", "hello")))
    result = call("demo", "--model", "tiny", *QUICK, "--new-tokens", "10", "--prompts", str(path))
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[-1] == "same tokens as transformers generate: yes"
    assert lines[-2].startswith("acceptance length ")
    assert (
        "fastest: speccompile " in result.stdout and "    wrap(model, 'ngram', tiers=(0, 3), policy=" in result.stdout
    )
    assert lines[0].startswith("built in ")
    assert any("transformers generate" in line and "1.00x" in line for line in lines)
    for name in ("speccompile K=0", "speccompile K=3"):
        assert any(name in line and "2 of 2" in line for line in lines)
    ratios = {
        name: re.findall(r"([\d.]+)x", line)
        for line in lines
        for name in ("K=0", "K=3")
        if f"speccompile {name} " in line
    }
    plain, (kernels, speculation, both) = ratios["K=0"], map(float, ratios["K=3"])
    # K=0 has no drafts, so that all of its ratio is the kernels'; that of a tier is a product.
    assert plain == [f"{kernels:.2f}"] * 2
    # Each is printed with two digits after the point.
    assert kernels * speculation == pytest.approx(both, abs=0.006 * (1 + kernels + speculation))


def test_demo_of_a_head(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts = [{"prompt": "abcabcabc"}, {"turns": ["hi"], "category": "qa"}]
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    model = tiny_model()
    layers = len(model.model.layers)
    save_eagle3(Eagle3Head.random(model, taps=(0, layers // 2, layers - 1)), tmp_path / "head")
    files = ["--prompts", str(path), "--head", str(tmp_path / "head")]
    result = call("demo", "--model", "tiny", *QUICK, "--new-tokens", "6", *files)
    assert result.exit_code == 0, result.output
    for name in ("EAGLE-3 head K=3", "suffix + head cost"):
        rows = [line for line in result.stdout.splitlines() if line.startswith(name)]
        # Of all prompts, and by category.
        assert "2 of 2" in rows[0] and len(rows) == 2
    assert result.stdout.splitlines()[-1] == "same tokens as transformers generate: yes"


def test_the_demos_ratios_are_taken_apart(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(seconds: float) -> list[Run]:
        return [Run([1, 2, 3, 4], 0.0, seconds, 3, 4)]

    measured = {TRANSFORMERS: runs(8.0), "speccompile K=0": runs(4.0), "speccompile K=3": runs(1.0)}
    show_table(measured, BUILT_IN[:1])
    rows = {line[:21].strip(): line[21:].split() for line in capsys.readouterr().out.splitlines()}
    assert rows["transformers generate"] == ["0.5", "-", "-", "1.00x", "1.33", "-"]
    assert rows["speccompile K=0"] == ["1.0", "2.00x", "-", "2.00x", "1.33", "1", "of", "1"]
    assert rows["speccompile K=3"] == ["4.0", "2.00x", "4.00x", "8.00x", "1.33", "1", "of", "1"]


def test_demo_fails_when_the_text_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    timed = demo_module.measure

    def measure(*arguments):  # type: ignore[no-untyped-def]
        runs = timed(*arguments)
        run = runs["speccompile K=3"][1]
        wrong = [run.tokens[0], (run.tokens[1] + 1) % 256, *run.tokens[2:]]
        runs["speccompile K=3"][1] = Run(wrong, run.first_seconds, run.seconds, run.passes, run.emitted)
        return runs

    monkeypatch.setattr(demo_module, "measure", measure)
    result = call("demo", "--model", "tiny", *QUICK, "--new-tokens", "4")
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[-1] == "same tokens as transformers generate: no"
    assert lines[-2].startswith("speccompile K=3, prompt 1: new token 1 is ")
    assert "explained by a logit change of" in lines[-2]


def test_speed_is_shown_by_category(capsys: pytest.CaptureFixture[str]) -> None:
    def runs(*seconds: float) -> list[Run]:
        return [Run([1, 2, 3, 4], 0.0, each, 2, 4) for each in seconds]

    prompts = [NamedPrompt("a", "quoting", "a"), NamedPrompt("b", "other", "b"), NamedPrompt("c", "other", "c")]
    show_categories({TRANSFORMERS: runs(9, 9, 9), "speccompile K=0": runs(4, 3, 5), "head": runs(1, 4, 4)}, prompts)
    (row,) = (line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("head"))
    assert row == ["head", "2.00", "4.00x", "2.00", "1.00x"]

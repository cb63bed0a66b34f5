"""The benchmark of a head that learns, on a model that takes no time."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from benchmarks import online
from speccompile.cli.models import tiny_model
from speccompile.heads import Eagle3Head, save_eagle3


def test_a_small_run_serves_each_request_by_both(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The tiny model's tokens are bytes: a head that learns from whole logs takes its time.
    monkeypatch.setattr(online, "LOG_LINES", 1)
    save_eagle3(Eagle3Head.random(tiny_model(), taps=(0, 1, 1)), tmp_path / "head")
    files = {"json_file": tmp_path / "out.json", "plot_file": tmp_path / "plot.svg"}
    sizes = {"requests": 4, "new_tokens": 12, "draft_len": 2, "window": 1, "max_len": 512, "backend": "eager"}
    learn = ["share=0.5", "judge_every=1", "judge_tokens=8"]
    online.main(head=tmp_path / "head", model="tiny", idle=0.2, learn=learn, **sizes, **files)
    shown = capsys.readouterr().out
    assert "the same texts: yes" in shown
    written = json.loads(files["json_file"].read_text())
    assert [row["domain"] for row in written["windows"]] == [online.CHAT] * 2 + [online.LOGS] * 2
    assert len(written["requests"]) == 8 and written["judgements"] > 0
    assert files["plot_file"].read_text().startswith("<?xml")


def test_figures_of_windows_and_domains() -> None:
    served = [
        online.Served(way, domain, emitted, steps=2, seconds=seconds)
        for domain, frozen, learning in ((online.CHAT, 4, 4), (online.LOGS, 2, 6))
        for way, emitted, seconds in ((online.FROZEN, frozen, 0.2), (online.LEARNING, learning, 0.3))
    ]
    found = online.report(served, 1)
    assert [(row[online.FROZEN], row[online.LEARNING]) for row in found["windows"]] == [(2, 2), (1, 3)]
    assert found["domains"][online.LOGS] == {online.FROZEN: 1, online.LEARNING: 3}
    assert found["slower"] == pytest.approx(1.5)


def test_a_log_is_json_line_by_line() -> None:
    lines = online.log_prompt(random.Random(0)).splitlines()
    assert len(lines) == online.LOG_LINES and all("request_id" in json.loads(line) for line in lines)

"""The benchmark of trees beside chains, on a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import trees
from speccompile.cli.models import load
from speccompile.heads import Eagle3Head, save_eagle3


def test_chain_and_trees_have_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    trees.main(
        model="tiny",
        mode="ngram",
        nodes=4,
        count=2,
        new_tokens=12,
        max_len=256,
        repeats=1,
        backend="eager",
        json_file=file,
    )
    shown = capsys.readouterr().out
    assert "the same texts as without drafts: yes" in shown and "speed over chain" in shown
    written = json.loads(file.read_text())
    (everything,) = [row for row in written["categories"] if row["category"] == "all"]
    assert everything["prompts"] == 2 and everything["ratios"]["chain"]["chain"] == 1
    assert list(written["steps_by_tier"]) == [
        "none",
        "chain",
        "tree, 2 branches",
        "tree, 4 branches",
        "cost",
    ]
    assert set(written["steps_by_tier"]["tree, 2 branches"]) <= {"0", "tree of 4 nodes, depth 4, 2 branches"}
    steps = written["steps"]
    assert steps["step_ms"].keys() == steps["over_chain"].keys() == set(written["steps_by_tier"]) - {"cost"}
    assert steps["moved_drafts"] == 2 and steps["move_share"] > 0 and "% of a step" in shown


def test_lookups_before_a_head(tmp_path: Path) -> None:
    file, head = tmp_path / "out.json", tmp_path / "head"
    model = load("tiny")[0]
    save_eagle3(Eagle3Head.random(model, taps=(0, 0, 1)), head, embedding=True)
    options: dict[str, Any] = {"nodes": 4, "count": 1, "new_tokens": 8, "max_len": 256, "repeats": 1}
    trees.main(
        model="tiny", mode="suffix,eagle3_one_model", draft=str(head), backend="eager", json_file=file, **options
    )
    written = json.loads(file.read_text())
    assert not written["different_texts"] and written["settings"]["mode"] == "suffix,eagle3_one_model"
    assert any(tier.startswith("tree of") for tier in written["steps_by_tier"]["tree, 3 branches"])

"""The benchmark of trees beside chains, on a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import trees


def test_chain_and_trees_have_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    trees.main(
        model="tiny", mode="ngram", nodes=4, count=2, new_tokens=12, max_len=256, backend="eager", json_file=file
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
        "tree, 3 branches",
        "tree, 4 branches",
        "cost",
    ]
    assert set(written["steps_by_tier"]["tree, 2 branches"]) <= {"0", "tree of 4 nodes, depth 4, 2 branches"}

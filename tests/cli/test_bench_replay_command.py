"""``speccompile bench-replay``: drafters over recorded tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from speccompile import wrap
from speccompile.cli.models import tiny_model
from speccompile.policies import CostTable
from speccompile.policies.costs import TierCost
from speccompile.traces import read_token_trace, replay
from support.commands import call


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("traces") / "run.jsonl"
    with (
        wrap(tiny_model(), "none", tiers=(0,), max_len=96, backend="eager") as spec,
        spec.record_trace(path, tokens=True, top=0),
    ):
        spec.generate(torch.tensor([list(b"abcabcabcabc")]), max_new_tokens=60)
    return path


def test_drafters_are_replayed(trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "drafters_to_replay.py").write_text("def repeat(tokens, draft_len):\n    return tokens[-1:]\n")
    costs = CostTable({(1, k): TierCost(10.0 + k) for k in (0, 3, 7)})
    (tmp_path / "costs.json").write_text(json.dumps(costs.as_json()))
    methods = ["--method", "ngram", "--method", "suffix+ngram", "--method", "drafters_to_replay:repeat"]
    lens = ["--draft-len", "3", "--draft-len", "7"]
    result = call("bench-replay", str(trace), *methods, *lens, "--costs", "costs.json", "--json", "out.json")
    assert result.exit_code == 0, result.output
    assert "1 requests, 59 tokens in 59 steps" in result.stdout
    rows = json.loads((tmp_path / "out.json").read_text())
    assert [(row["method"], row["draft_len"]) for row in rows][:3] == [("ngram", 3), ("ngram", 7), ("suffix+ngram", 3)]
    expected = replay(read_token_trace(trace), "ngram", draft_len=7, costs=costs)
    assert rows[1]["acceptance_length"] == expected.acceptance_length
    assert rows[1]["tokens_per_second"] == expected.tokens_per_second


def test_without_costs_no_speed_is_predicted(trace: Path, tmp_path: Path) -> None:
    result = call("bench-replay", str(trace))
    assert result.exit_code == 0 and "no speed without costs of the tiers" in result.stdout
    (tmp_path / "costs.json").write_text("{}")
    # The trace timed no tiers.
    for file in (str(tmp_path / "costs.json"), str(trace)):
        result = call("bench-replay", str(trace), "--costs", file)
        assert result.exit_code == 2 and "it has no costs of tiers" in result.stderr
    result = call("bench-replay", str(trace), "--method", "early_exit", "--option", "exit_layer=1")
    assert result.exit_code == 2 and "it drafts from more than tokens" in result.stderr

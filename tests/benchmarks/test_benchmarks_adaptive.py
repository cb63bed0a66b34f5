"""The benchmark of policies that adapt: it runs, all have the same prompts, and none forgets between them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks import adaptive
from speccompile.policies import Cost, CostTable, Ladder, TierCost


def test_a_small_run_compares_all_policies_on_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    adaptive.main(model="tiny", count=2, new_tokens=6, tiers="0,2", backend="eager", max_len=256, json_file=file)
    out = capsys.readouterr().out
    made = json.loads(file.read_text())
    assert [row["way"] for row in made["ways"]] == ["none", "fixed:2", "cost", "ema"]
    assert made["best_fixed"] in ("none", "fixed:2")
    best = next(row for row in made["ways"] if row["way"] == made["best_fixed"])
    assert best["ratio_to_the_best_fixed"] == 1 and made["different_texts"] == []
    assert set(made["ways"][0]["steps_by_tier"]) == {"none"}
    for text in ("to the best fixed", "by category", "texts that differ from the first one's: none"):
        assert text in out


def test_rounds_over_chains_and_trees(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = {"tiers": "0,2", "tree": ["4,2,2"], "backend": "eager", "max_len": 256}
    adaptive.main(
        model="tiny", mode="suffix", count=1, new_tokens=6, rounds=3, policy=["cost"], json_file=file, **sizes
    )
    made = json.loads(file.read_text())
    assert [row["way"] for row in made["ways"]] == ["none", "fixed:2", "tree:4,2,2", "cost"]
    for row in made["ways"]:
        assert len(row["rounds"]) == 3 and row["decode_tokens_per_second"] == sorted(row["rounds"])[1]
    assert set(made["ways"][1]["steps_by_tier"]) <= {"none", "2", "tree:4,2,2"} and not made["different_texts"]
    with pytest.raises(typer.Exit):
        adaptive.main(model="tiny", tree=["4,2"])


def test_a_policy_keeps_what_it_has_learned() -> None:
    kept = adaptive.Continued(Cost())
    ladder = Ladder((0, 1), CostTable({(1, k): TierCost(1.0) for k in (0, 1)}))
    assert kept.start(ladder) is kept.start(ladder) and str(kept) == "cost"


def test_what_does_not_adapt_is_refused() -> None:
    with pytest.raises(typer.Exit):
        adaptive.main(model="tiny", policy=["fixed:1"], tiers="0,1")

"""The benchmark of drafters by category, on a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from benchmarks import drafters
from speccompile.cli.measure import Continued
from speccompile.cli.models import tiny_model
from speccompile.heads import Eagle3Head, save_eagle3
from speccompile.policies import Cost, CostTable, Ladder, TierCost


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    save_eagle3(Eagle3Head.random(tiny_model(), taps=(0, 1, 1)), folder)
    return folder


def test_all_ways_have_the_same_texts(head: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    sizes = {"count": 3, "new_tokens": 12, "draft_len": [2], "max_len": 256}
    options = {"tree": ["3,2,2"], "temperature": 0.8, "backend": "eager", "rounds": 2, "json_file": file}
    drafters.main(head=head, model="tiny", **options, **sizes)
    shown = capsys.readouterr().out
    assert "the same texts as without drafts: yes" in shown and "speed over ngram" in shown
    written = json.loads(file.read_text())
    rows = {row["category"]: row for row in written["categories"]}
    assert rows["all"]["prompts"] == 3 and rows["all"]["ratios"]["ngram"]["ngram"] == 1
    assert rows["all"]["acceptance_length"]["none"] == 1
    steps = written["steps_by_tier"]
    assert set(steps["none"]) == {"0"} and steps["head"]["2"] > 0.5
    by_tree = [f"{name}, tree:3,2,2" for name in ("head", "suffix+head")]
    costs = [f"{name}, cost" for name in ("ngram", "head", "suffix+head")]
    assert list(steps) == ["none", "ngram", "head", "suffix+head", *by_tree, *costs]
    compared = {(row["category"], row["way"]): row for row in written["comparisons"]}
    assert compared["all", "suffix+head, cost"]["best"] in ("ngram", "head", "head, tree:3,2,2")
    assert "speed over the best single drafter" in shown
    assert steps["head, tree:3,2,2"]["tree of 3 nodes, depth 2, 2 branches"] > 0.5


def test_every_tier_of_a_lookup_and_the_policies(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    options = {"count": 1, "new_tokens": 6, "max_len": 256, "backend": "eager", "json_file": file}
    drafters.main(mode=["suffix"], model="tiny", draft_len=[2, 3], tree=["4,2,2"], policy=["cost", "ema"], **options)
    written = json.loads(file.read_text())
    fixed = ["suffix, K=2", "suffix, K=3", "suffix, tree:4,2,2"]
    assert list(written["steps_by_tier"]) == ["none", *fixed, "suffix, cost", "suffix, ema"]
    assert not written["different_texts"] and written["categories"][0]["ratios"]["suffix, K=2"]["suffix, K=2"] == 1


@pytest.mark.parametrize("wrong", [{"tree": ["4,2"]}, {"policy": ["fixed:3"]}])
def test_what_is_no_tree_or_does_not_adapt_is_refused(wrong: dict[str, list[str]]) -> None:
    with pytest.raises(typer.Exit):
        drafters.main(model="tiny", **wrong)


def test_a_policy_keeps_what_it_has_learned() -> None:
    kept = Continued(Cost())
    ladder = Ladder((0, 1), CostTable({(1, k): TierCost(1.0) for k in (0, 1)}))
    assert kept.start(ladder) is kept.start(ladder) and str(kept) == "cost"


def test_categories_that_do_not_quote_are_summed() -> None:
    found = drafters.groups(["qa", "rag", "qa", "math"])
    assert [(group.name, group.indices) for group in found] == [
        ("qa", (0, 2)),
        ("rag", (1,)),
        ("math", (3,)),
        ("those that do not quote", (0, 2, 3)),
        ("all", (0, 1, 2, 3)),
    ]
    assert [group.name for group in drafters.groups(["qa"])] == ["qa", "all"]

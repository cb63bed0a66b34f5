"""The ceiling of drafters: counts of right drafts, and the steps that follow from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import typer

import speccompile
from benchmarks import ceiling
from benchmarks.ceiling import Drafted, best, choose, first_that_drafts, watch_text
from benchmarks.watched_drafts import Watched
from speccompile.cli.models import tiny_model
from speccompile.heads import Eagle3Head, save_eagle3

SIZES = {"max_len": 160, "backend": "eager", "prefix_reuse": False, "max_batch": 1}
K, NEW_TOKENS = 3, 60


def test_steps_are_those_of_a_text_that_jumps() -> None:
    text = Drafted(offered=(3, 3, 0, 3, 1), right=(2, 0, 0, 3, 0))
    assert text.steps(0) == 5 and text.steps(1) == 3 and text.steps(2) == 2 and text.steps(7) == 2
    other = Drafted(offered=(0, 3, 3, 3, 3), right=(0, 3, 1, 0, 0))
    assert choose([text, other], first_that_drafts).right == (2, 0, 1, 3, 0)
    assert choose([text, other], best).right == (2, 3, 1, 3, 0)


@pytest.mark.parametrize("mode", ["ngram", "eagle3_one_model"])
def test_the_steps_are_those_of_a_run(mode: str) -> None:
    """With the rule ``exact``, which accepts what is right and goes on after it."""
    model = tiny_model()
    draft = {"draft": Eagle3Head.random(model, taps=(0, 1, 1))} if mode != "ngram" else {}
    ids = torch.randint(5, 9, (40,), generator=torch.Generator().manual_seed(3)).tolist()
    options = SIZES | draft | {"tiers": (0, K), "policy": f"fixed:{K}"}
    with speccompile.wrap(model, mode, acceptance=Watched(), **options) as spec:
        text, drafted = watch_text(spec, ids, NEW_TOKENS, K)
    prompt = torch.tensor([ids])
    with speccompile.wrap(model, mode, **options) as spec:
        whole = spec.generate(prompt, torch.ones_like(prompt), max_new_tokens=NEW_TOKENS, do_sample=False)
        steps = spec.stats.requests[0].row_steps
    assert whole[0, 40:].tolist() == text
    assert drafted.steps(K) == steps and len(drafted.right) == len(text) - 1
    assert max(drafted.right) > 0 or mode != "ngram"


def test_a_drafter_that_learns_from_its_drafts_is_refused() -> None:
    """Its counts of right drafts were half as large again as in a run."""
    with pytest.raises(typer.Exit):
        ceiling.main(mode=["recycle"], model="tiny", count=1, new_tokens=6, max_len=256, backend="eager")


def test_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_eagle3(Eagle3Head.random(tiny_model(), taps=(0, 1, 1), draft_vocab_size=64), tmp_path)
    file = tmp_path / "out.json"
    options = {"count": 3, "new_tokens": 12, "draft_len": [2], "max_len": 256, "backend": "eager", "json_file": file}
    ceiling.main(head=tmp_path, model="tiny", **options)
    shown = capsys.readouterr().out
    assert "the best at each step" in shown and "outside of the draft vocabulary" in shown
    rows = {row["category"]: row for row in json.loads(file.read_text())["categories"]}
    found = {row["drafter"]: row for row in rows["all"]["drafters"]}
    assert list(found) == ["ngram", "suffix", "head", ceiling.FIRST, ceiling.BEST]
    lengths = {name: row["acceptance_length"]["2"] for name, row in found.items()}
    assert lengths[ceiling.BEST] >= max(lengths.values()) and min(lengths.values()) >= 1
    assert 0 < rows["all"]["outside_draft_vocab"] < 1

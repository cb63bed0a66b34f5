"""The replay of lookups over recorded texts, held against steps that ran."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import lookups
from speccompile import Tree, wrap
from speccompile.cli.models import tiny_model
from speccompile.modes import ReadyMode, create
from speccompile.policies import Fixed


def test_accepted_tokens_are_those_on_a_path() -> None:
    nodes = [(0, 5), (0, 6), (1, 7), (2, 7), (4, 8), (0, -1)]
    assert [lookups.accepted(nodes, text) for text in ([6, 7, 8, 9], [5, 7, 8], [7], [])] == [3, 2, 0, 0]


@pytest.mark.parametrize("shape", [4, Tree.dynamic(6, 6, 6)], ids=["chain", "tree"])
@pytest.mark.parametrize("mode", ["suffix", "ngram"])
def test_a_replay_has_the_steps_of_the_engine(mode: str, shape: int) -> None:
    prompt = [3, 9, 4, 1, 3, 9, 5, 1, 3, 9] * 2
    with wrap(tiny_model(), mode, tiers=(0, shape), max_len=128, backend="eager", policy=Fixed(shape)) as spec:
        request = spec.engine.submit(prompt, max_new_tokens=40, do_sample=False)
        text = lookups.Recorded("", prompt, request.result().token_ids)
        vocab_size = spec.arena.layout.vocab_size
    drafter = create(mode, {})
    assert isinstance(drafter, ReadyMode)
    # The prompt's last token may be read by its own step, for which nothing is proposed.
    assert request.stats.row_steps - lookups.replay(drafter, shape, text, vocab_size) in (0, 1)
    assert request.stats.row_steps < 36


def test_figures_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    lookups.main(
        model="tiny", count=2, new_tokens=8, mode=["ngram"], nodes=[4], max_len=256, backend="eager", json_file=file
    )
    assert "acceptance length" in capsys.readouterr().out
    everything = json.loads(file.read_text())["categories"][-1]
    assert everything["category"] == "all" and everything["prompts"] == 2
    assert all(1 <= length <= 5 for length in everything["acceptance_length"].values())

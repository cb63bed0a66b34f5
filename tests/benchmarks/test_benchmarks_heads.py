"""The benchmark of draft heads, on a model that takes no time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.heads import main, mebibytes_read, random_head
from speccompile import wrap
from speccompile.cli.models import tiny_model


def test_a_small_run_times_drafting_and_keeping_warm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    main(model="tiny", draft_len=3, draft_vocab=64, repeats=1, backend="eager", quick=True, json_file=file)
    shown = capsys.readouterr().out
    assert "drafting 3 and keeping warm, to the verify" in shown and "keeping warm, to a plain step" in shown
    written = json.loads(file.read_text())
    assert written["settings"]["draft_vocab"] == 64
    times = written["milliseconds"]
    assert all(value > 0 for row in times.values() for value in row.values())
    (whole,), (verify,) = (
        [row["median"] for name, row in times.items() if name.startswith(start)]
        for start in ("the same with 3", "verify")
    )
    assert written["ratios"]["drafting 3 and keeping warm, to the verify"]["median"] == pytest.approx(
        whole / verify - 1
    )


def test_bytes_that_are_read() -> None:
    """The layer once more than there are drafts after the first, the lm_head once for each."""
    model = tiny_model()
    head = random_head(model, None)
    assert head.config.taps == (0, 1, 1)
    with wrap(model, "eagle3_one_model", draft=head, tiers=(0, 3), max_len=64, backend="eager") as spec:
        target, drafter = mebibytes_read(spec, 3)
    layer = sum(weight.nbytes for weight in head.layers.parameters())
    once = head.fc.weight.nbytes
    thrice = head.lm_head.weight.nbytes + head.norm.weight.nbytes + head.rotary.inv_freq.nbytes
    assert drafter * 2**20 == pytest.approx(3 * layer + once + 3 * thrice, rel=0.01)
    own = sum(weight.nbytes for weight in model.parameters()) - model.get_input_embeddings().weight.nbytes
    assert target * 2**20 == pytest.approx(own, rel=0.01)

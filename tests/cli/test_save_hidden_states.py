"""``speccompile save-hidden-states``: a file of texts becomes records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.cli.models import tiny_model, tiny_tokenizer
from speccompile.hidden_states import SavedHiddenStates


def lines(folder: Path, *objects: Any) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("".join(f"{json.dumps(item)}\n" for item in objects))
    return path


def test_the_command_writes_records_and_specforge_files(tmp_path: Path) -> None:
    path = lines(tmp_path, {"id": "one", "text": "an old lighthouse"}, {"text": "in the evening " * 20})
    arguments = ["save-hidden-states", "tiny", "--data", str(path), "--output", str(tmp_path / "out")]
    arguments += ["--layers", "0,1", "--max-len", "64", "--max-batch", "1", "--backend", "eager"]
    found = CliRunner().invoke(app, [*arguments, "--specforge", str(tmp_path / "features")])
    assert found.exit_code == 0, found.output
    assert "2 records written" in found.output and "2 feature files for SpecForge written" in found.output
    assert len([*(tmp_path / "features").rglob("*.ckpt")]) == 2
    saved = SavedHiddenStates(tmp_path / "out")
    assert saved["one"].input_ids.tolist() == tiny_tokenizer()("an old lighthouse")["input_ids"]
    assert saved["one"].aux_hidden_state.shape == (17, 2 * tiny_model().config.hidden_size)
    (other,) = saved.keys() - {"one"}
    # Its beginning: the token after it has to have a place.
    assert len(saved[other].input_ids) == 63
    for wrong, message in (
        (["--layers", "a"], "1,14,26"),
        (["--layers", "9"], "0 .. 1"),
        (["--max-new-tokens", "64"], "leaves none"),
    ):
        found = CliRunner().invoke(app, [*arguments, *wrong])
        assert found.exit_code == 2 and message in found.output

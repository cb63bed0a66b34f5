"""``speccompile make-texts``: a model's folder becomes texts, and the same command continues."""

from __future__ import annotations

import json
import re
from pathlib import Path

from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.training import read_texts
from support.chats import chat_model, chat_tokenizer


def test_a_folder_of_texts_is_made_and_extended(tmp_path: Path) -> None:
    chat_model().save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    excluded = tmp_path / "excluded.jsonl"
    excluded.write_text(json.dumps({"turns": ["a b c d e f"]}))
    arguments = ["make-texts", str(tmp_path / "model"), "--output", str(tmp_path / "texts"), "--max-batch", "4"]
    arguments += ["--backend", "eager", "--temperature", "1", "--max-user-tokens", "40", "--max-answer-tokens", "10"]
    arguments += ["--exclude", str(excluded)]
    for tokens in (1, 40):
        done = CliRunner().invoke(app, [*arguments, "--tokens", str(tokens)])
        assert done.exit_code == 0, done.output
        texts = read_texts(tmp_path / "texts")
        assert texts.tokens >= tokens and texts.source.options["temperature"] == 1.0
        assert re.search(rf"{len(texts)} texts of {texts.tokens} tokens in .*; dropped: ", done.output)
    done = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert done.exit_code == 2 and "were written with seed 0 and not 1" in " ".join(done.output.split())


def test_a_model_without_a_chat_template_is_refused(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["make-texts", "tiny", "--output", str(tmp_path / "texts")])
    assert done.exit_code == 2 and "it has no chat template" in " ".join(done.output.split())
    assert not (tmp_path / "texts").exists()

"""``speccompile train-head``: texts become a head, and the same command continues."""

from __future__ import annotations

import inspect
import re
from dataclasses import fields
from pathlib import Path

from typer.testing import CliRunner

from speccompile.cli import app
from speccompile.cli.training_commands import train_head
from speccompile.heads import load_eagle3
from speccompile.training import TrainOptions
from support.chats import END, chat_model, chat_tokenizer
from support.training_data import greedy_texts, write_texts


def test_a_head_is_trained_in_two_calls(tmp_path: Path) -> None:
    model = chat_model()
    model.generation_config.eos_token_id = END
    model.save_pretrained(tmp_path / "model")
    chat_tokenizer().save_pretrained(tmp_path / "model")
    texts = write_texts(tmp_path / "texts", model, greedy_texts(model, 40))
    arguments = ["train-head", str(tmp_path / "model"), "--texts", str(texts), "--output", str(tmp_path / "head")]
    arguments += ["--layers", "0", "--epochs", "2", "--batch-tokens", "256", "--unroll", "2", "--draft-vocab", "20"]
    done = CliRunner().invoke(app, [*arguments, "--minutes", "0"])
    assert done.exit_code == 0, done.output
    assert re.search(r"step 1 of 1\d; the same command continues", " ".join(done.output.split()))
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert re.search(r"step (\d+) of \1 best head: drafts accepted 0", " ".join(done.output.split()))
    assert re.search(r"step \d+: drafts accepted", done.stderr)
    assert load_eagle3(tmp_path / "head", model).config.taps == (0,)
    done = CliRunner().invoke(app, [*arguments, "--seed", "1"])
    assert done.exit_code == 2 and "begun with seed 0 and not 1" in " ".join(done.output.split())


def test_every_option_of_a_training_is_one_of_the_command() -> None:
    options = {field.name for field in fields(TrainOptions)}
    assert options <= set(inspect.signature(train_head).parameters)

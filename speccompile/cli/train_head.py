"""``speccompile train-head``: train a draft head for a model, from texts that the model wrote."""

from __future__ import annotations

from pathlib import Path

import typer

from speccompile.cli.devices import choose_device
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.training import TrainOptions, train_head


def run(model: str, texts: list[Path], output: Path, options: TrainOptions, device: str | None) -> None:
    """See ``speccompile train-head --help``."""
    with session():
        target, tokenizer = load(model, choose_device(device))
        trained = train_head(target, texts[0] if len(texts) == 1 else texts, output, options, tokenizer=tokenizer)
        ends = "" if trained.finished else "; the same command continues"
        typer.echo(f"{trained.folder}: step {trained.step} of {trained.steps}{ends}")
        typer.echo(f"best head: {trained.acceptance}")

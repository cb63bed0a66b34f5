"""``speccompile make-texts``: let the target write texts that a draft head is trained from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from speccompile import modes, wrap
from speccompile.cli.devices import choose_device
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions
from speccompile.training import TextOptions, make_texts, most_tokens
from speccompile.training.text_maker import counts

# Each max_len needs separate compiled code. Rounding up shares the code.
_MAX_LEN_STEP = 256


def run(model: str, output: Path, texts: TextOptions, options: WrapOptions, device: str | None) -> None:
    """See ``speccompile make-texts --help``."""
    with session():
        # Check the options before the model is loaded, which is slow.
        modes.create(options.mode, {})
        target, tokenizer = load(model, choose_device(device, options.backend))
        max_len = -(-most_tokens(tokenizer, texts) // _MAX_LEN_STEP) * _MAX_LEN_STEP
        with wrap(target, **replace(options, max_len=max_len).arguments()) as spec:
            saved = make_texts(spec, tokenizer, output, texts)
        typer.echo(f"{len(saved)} texts of {saved.tokens} tokens in {output}; dropped: {counts(saved.dropped)}")

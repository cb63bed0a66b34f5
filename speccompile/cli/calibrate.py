"""``speccompile calibrate``: gather the mean squares of the inputs of a model's linears."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
import typer
from transformers import PreTrainedTokenizerBase

from speccompile import calibrate
from speccompile.cli.devices import choose_device
from speccompile.cli.files import read_text
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.training import read_texts


def run(name: str, paths: Sequence[Path], output: Path, tokens: int, device: str | None) -> None:
    """See ``speccompile calibrate --help``."""
    with session():
        model, tokenizer = load(name, choose_device(device))
        found = calibrate(model, _alternating([_texts(path, tokenizer) for path in paths]), tokens=tokens)
        found.save(output)
        typer.echo(f"{len(found.importance)} weights over {found.tokens} tokens, in {output}")


def _texts(path: Path, tokenizer: PreTrainedTokenizerBase) -> Iterable[torch.Tensor]:
    """Token ids: those of training texts, or of one text in a file of another kind."""
    if path.is_dir() or path.suffix == ".npz":
        return (text.input_ids for text in read_texts(path))
    return [torch.tensor(tokenizer(read_text("--texts", path))["input_ids"], dtype=torch.int64)]


def _alternating(sources: Sequence[Iterable[torch.Tensor]]) -> Iterator[torch.Tensor]:
    for texts in itertools.zip_longest(*sources):
        yield from (text for text in texts if text is not None)

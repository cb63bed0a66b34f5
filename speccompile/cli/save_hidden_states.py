"""``speccompile save-hidden-states``: hidden states of a file of texts, to train draft heads from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speccompile import modes, wrap
from speccompile.cli.generate import Backend, Model
from speccompile.cli.models import load
from speccompile.cli.session import parse_layers, session
from speccompile.cli.texts import read_texts
from speccompile.errors import InvalidInput
from speccompile.hidden_states import SaveHiddenStates


def command(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            help="JSON lines with 'conversations' or 'messages' (SpecForge), 'text', 'prompt' or 'turns', and "
            "perhaps 'id'."
        ),
    ],
    output: Annotated[Path, typer.Option(help="Folder for the records; those that are there are not made again.")],
    layers: Annotated[
        str | None, typer.Option(help="Decoder layers, such as 1,14,26; those that EAGLE-3 reads if left out.")
    ] = None,
    max_new_tokens: Annotated[
        int, typer.Option(min=1, help="Above 1, save what the model writes behind each text, too.")
    ] = 1,
    mode: Annotated[str, typer.Option(help="How to draft what the model writes.")] = "none",
    interval: Annotated[int, typer.Option(min=1, help="Records of a file.")] = 20,
    prefix: Annotated[str, typer.Option(help="What files are called; one for each process.")] = "data",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens; of longer texts the beginning is saved.")] = 2048,
    max_batch: Annotated[int, typer.Option(min=1, help="Most texts at a time.")] = 4,
    backend: Backend = "auto",
) -> None:
    """Save the hidden states of texts. Killed, it goes on where it stopped when it is started again."""
    with session():
        if max_new_tokens >= max_len:
            reason = f"of {max_len} tokens (--max-len) it leaves none to a text"
            raise InvalidInput(name="--max-new-tokens", reason=reason)
        saves = SaveHiddenStates(output, interval, prefix, None if layers is None else parse_layers(layers))
        # Before the model is loaded, since that takes a while.
        modes.create(mode, {})
        target, tokenizer = load(model)
        texts = read_texts(data, tokenizer, max_len - max_new_tokens)
        tiers = (0,) if max_new_tokens == 1 else (0, 1, 3, 7)
        sizes = {"max_len": max_len, "max_batch": max_batch}
        with wrap(target, mode, tiers=tiers, backend=backend, save_hidden_states=saves, **sizes) as spec:  # type: ignore[arg-type]
            before = len(spec.hidden_states.written)
            spec.save_hidden_states(
                [text.ids for text in texts],
                ids=[text.name for text in texts],
                loss_masks=[text.mask for text in texts] if max_new_tokens == 1 else None,
                max_new_tokens=max_new_tokens,
            )
            made = len(spec.hidden_states.written) - before
            typer.echo(f"{made} records written to {output}, {before} were there")

"""``speccompile save-hidden-states``: save the hidden states of texts, to train draft heads from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import typer

from speccompile import modes, wrap
from speccompile.cli.devices import choose_device
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions
from speccompile.hidden_states import SavedHiddenStates, SaveHiddenStates, export_specforge
from speccompile.training.own_texts import read_own_texts


def run(
    model: str,
    data: Path,
    records: tuple[Path, int, str, tuple[int, ...] | None],
    options: WrapOptions,
    device: str | None,
    *,
    max_new_tokens: int,
    specforge: Path | None,
) -> None:
    """See ``speccompile save-hidden-states --help``.

    Args:
        records: arguments of :class:`~speccompile.hidden_states.SaveHiddenStates`.
        specforge: folder for SpecForge's feature files, or None.
        options: of ``wrap``, with ``max_len``.
    """
    with session():
        assert options.max_len is not None
        saves = SaveHiddenStates(*records)
        # Check the options before the model is loaded, which is slow.
        modes.create(options.mode, {})
        target, tokenizer = load(model, choose_device(device, options.backend))
        most = options.max_len - max_new_tokens
        texts = [text.truncated(most) for text in read_own_texts(data, tokenizer)]
        with wrap(target, **replace(options, save_hidden_states=saves).arguments()) as spec:
            before = len(spec.hidden_states.written)
            spec.save_hidden_states(
                [text.ids for text in texts],
                ids=[text.name for text in texts],
                loss_masks=[text.mask for text in texts] if max_new_tokens == 1 else None,
                max_new_tokens=max_new_tokens,
            )
            count = len(spec.hidden_states.written) - before
            typer.echo(f"{count} records written to {records[0]}, {before} were there")
        if specforge is not None:
            files = export_specforge(SavedHiddenStates(records[0]), specforge)
            typer.echo(f"{len(files)} feature files for SpecForge written to {specforge}")

"""``speccompile quantize``: write a model's packed weights to a folder, or verify such a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer

from speccompile import quantize
from speccompile.cli.models import load, load_stored
from speccompile.cli.session import session
from speccompile.errors import InvalidOption, error_line
from speccompile.quantized.packed_folder import PackedFolder
from speccompile.quantized.packed_manifest import is_packed
from speccompile.quantized.packed_writer import check_output
from speccompile.utils.device_memory import sized


def run(name: str, output: Path, form: str, calibration: Path | None, head: Path | None) -> None:
    """See ``speccompile quantize --help``."""
    with session():
        check_output(output)
        weights: Any = form
        if form == "stored":
            model, tokenizer, weights = load_stored(name)
        else:
            model, tokenizer = load(name)
        try:
            quantize(model, output, weights=weights, calibration=calibration, tokenizer=tokenizer, head=head)
        except OSError as error:
            reason = f"it cannot be written ({error_line(error)})"
            raise InvalidOption(where="the command line", name="--output", value=str(output), reason=reason) from error
        nbytes = sum(path.stat().st_size for path in output.glob("*.safetensors"))
        typer.echo(f"{output}: {sized(nbytes)} of weights")


def verify(name: str) -> None:
    """Compare every tensor of a packed folder with its hash."""
    with session():
        if not is_packed(name):
            reason = "it is not a folder that quantize wrote; give one, or leave --verify out"
            raise InvalidOption(where="the command line", name="MODEL", value=name, reason=reason)
        count = PackedFolder(Path(name)).verify()
        typer.echo(f"{name}: {count} tensors are as they were written")

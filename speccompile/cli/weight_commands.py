"""Commands for rounded weights, with their options. Imports as in ``commands.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speccompile.calibration import TOKENS
from speccompile.cli.arguments import Backend, Device, Model, check_device, check_model, check_wrap
from speccompile.cli.files import check_output_file, check_quantize
from speccompile.cli.session import one_line_errors
from speccompile.compiler.options import WrapOptions
from speccompile.utils.model_names import check_tokenizer

weights = typer.Typer()


@weights.command("quantize")
def quantize(
    model: Model,
    output: Annotated[
        Path | None, typer.Option(file_okay=False, help="New folder for the packed weights. Needed without --verify.")
    ] = None,
    form: Annotated[
        str,
        typer.Option(
            "--weights",
            help="int4, int8, or stored: the integers of a quantised checkpoint (a folder or a GGUF file).",
        ),
    ] = "int4",
    calibration: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="File of calibrate, by which int4 rounds.")
    ] = None,
    head: Annotated[
        Path | None,
        typer.Option(exists=True, file_okay=False, help="Folder of a draft head, which is copied; for --mode auto."),
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare each tensor of MODEL, a packed folder, with its SHA-256.")
    ] = False,
) -> None:
    """Write a model's weights as steps read them, to a folder that other commands map in seconds."""
    with one_line_errors():
        check_model(model)
        check_quantize(output, form, calibration, head, verify=verify)
    from speccompile.cli import quantize

    if output is None:
        quantize.verify(model)
    else:
        quantize.run(model, output, form, calibration, head)


@weights.command("calibrate")
def calibrate(
    model: Model,
    texts: Annotated[
        list[Path],
        typer.Option(exists=True, help="Folder of make-texts, or a text file in UTF-8; may repeat."),
    ],
    output: Annotated[Path, typer.Option(dir_okay=False, help="File for the calibration (safetensors).")],
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to read, alternating between texts.")] = TOKENS,
    device: Device = None,
) -> None:
    """Gather the mean squares of the inputs of a model's linears, for wrap(weights="int4", calibration=...)."""
    with one_line_errors():
        check_model(model)
        check_device(device)
        check_tokenizer(model)
        check_output_file("--output", output)
    from speccompile.cli import calibrate

    calibrate.run(model, texts, output, tokens, device)


@weights.command("measure-weights")
def measure_weights(
    model: Model,
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A text file, in UTF-8.")],
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of it.")] = 4096,
    window: Annotated[int, typer.Option(min=2, help="Predicted tokens of a window.")] = 512,
    calibration: Annotated[
        Path | None,
        typer.Option(
            exists=True, dir_okay=False, help="Also measure int4 weights that are rounded by this file of calibrate."
        ),
    ] = None,
    backend: Backend = WrapOptions.backend,
    device: Device = None,
) -> None:
    """Compare the perplexity of a model's weights as float32, int8, int4 and bfloat16 over a text."""
    with one_line_errors():
        check_wrap(model, WrapOptions(mode="none", backend=backend), device)
        check_tokenizer(model)
    from speccompile.cli import measure_weights

    measure_weights.run(model, text, tokens, window, calibration, backend, device)

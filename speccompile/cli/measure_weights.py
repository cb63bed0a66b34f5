"""``speccompile measure-weights``: measure the loss by rounding of the weights, as perplexity over a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from speccompile import wrap
from speccompile.cli.devices import choose_device
from speccompile.cli.files import read_text
from speccompile.cli.models import load, load_stored
from speccompile.cli.session import session
from speccompile.errors import InvalidOption, UnsupportedCheckpoint
from speccompile.lowering.backends import CudaGraph
from speccompile.quantized.reading import is_read
from speccompile.utils.kv_forms import KV_FORMS
from speccompile.utils.model_names import is_gguf
from speccompile.utils.progress import task
from speccompile.utils.weight_forms import WEIGHT_FORMS

Forward = Callable[..., Any]


#: Row name of calibrated weights.
CALIBRATED = "int4, calibrated"


def run(
    name: str, text: Path, tokens: int, window: int, calibration: Path | None, backend: str, device: str | None
) -> None:
    """See ``speccompile measure-weights --help``."""
    with session():
        model, tokenizer = load(name, choose_device(device, backend))
        ids = torch.tensor(tokenizer(read_text("--text", text))["input_ids"][: tokens + 1], dtype=torch.int64)
        if len(ids) <= window:
            reason = f"it has {len(ids)} tokens, and a window of {window} needs {window + 1}"
            raise InvalidOption(where="the command line", name="--text", value=str(text), reason=reason)
        found = dict(perplexities(model, ids.to(model.device), window, calibration, backend))
        if is_gguf(name) or is_read(Path(name)):
            try:
                form, value = of_stored(name, ids, window, "auto" if backend == CudaGraph.name else backend)
                found[form] = value
            except UnsupportedCheckpoint as error:
                # The dequantised weights were measured above.
                typer.echo(f"note: {error}", err=True)
    table = Table(title=f"{(len(ids) - 1) // window * window} tokens in windows of {window}", title_justify="left")
    for heading in ("weights", "perplexity", "to float32"):
        table.add_column(heading, justify="left" if heading == "weights" else "right")
    for form, value in found.items():
        table.add_row(form, f"{value:.3f}", f"{value / found['float32']:.3f}x")
    Console().print(table)


def perplexities(
    model: PreTrainedModel, ids: torch.Tensor, window: int, calibration: Path | None, backend: str
) -> Iterator[tuple[str, float]]:
    """Perplexity over ``ids`` ``[P]`` for each form of the weights, and of keys and values. Converts ``model`` to
    bfloat16 in the end."""
    model.float()
    with task("measure float32"):
        yield "float32", perplexity(model, ids, window)
    forms: dict[str, dict[str, Any]] = {form: {"weights": form} for form in WEIGHT_FORMS if form != "same"}
    if calibration is not None:
        forms[CALIBRATED] = {"weights": "int4", "calibration": calibration}
    for form, options in forms.items():
        spec = wrap(model, "none", tiers=(0,), max_len=window, backend=backend, **options)
        with spec, task(f"measure {form}"):
            yield form, perplexity(spec, ids, window)
    for kv in KV_FORMS[1:]:
        try:
            spec = wrap(model, "none", tiers=(0,), max_len=window, backend=backend, kv=kv)
        except InvalidOption:
            # The model keeps no keys and values, or they do not fit into this form.
            continue
        with spec, task(f"measure keys and values in {kv}"):
            yield f"kv={kv}", perplexity(spec, ids, window)
    cast(Any, model).to(torch.bfloat16)
    with task("measure bfloat16"):
        yield "bfloat16", perplexity(model, ids, window)


def of_stored(name: str, ids: torch.Tensor, window: int, backend: str) -> tuple[str, float]:
    """Return the form of a quantised checkpoint, and the perplexity of its integers over ``ids`` ``[P]``.

    Inputs are rounded as in steps. The other forms use dequantised weights. Integers run on the CPU.
    """
    model, _, weights = load_stored(name)
    spec = wrap(model, "none", tiers=(0,), max_len=window, backend=backend, weights=weights)
    with spec, task("measure the stored integers"):
        return f"{weights.format}, stored", perplexity(spec, ids, window)


def perplexity(forward: Forward, ids: torch.Tensor, window: int) -> float:
    """The exponential of the mean negative log-likelihood of a token, given those before it in its window.

    Args:
        forward: a causal LM.
        ids: ``[P]``, split into windows of ``window`` predicted tokens each. An incomplete window is left out.
    """
    losses = []
    with torch.inference_mode():
        for start in range(0, len(ids) - window, window):
            piece = ids[start : start + window + 1]
            logits = forward(input_ids=piece[None, :-1], use_cache=False).logits[0].float()
            losses.append(float(F.cross_entropy(logits, piece[1:])))
    return math.exp(sum(losses) / len(losses))

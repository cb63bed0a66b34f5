"""The perplexity of rounded weights over a text, beside llama.cpp's files of the same model.

``python -m benchmarks.perplexity --text FILE``; see README.md beside this file.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from gguf import GGMLQuantizationType
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.peer_processes import NOT_INSTALLED, write_rounded
from speccompile.cli.measure_weights import perplexities
from speccompile.cli.session import session
from speccompile.errors import InvalidOption
from speccompile.pretrained import load, smollm2_gguf
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task

WORKER = Path(__file__).with_name("perplexity_worker.py")
KINDS = ("F32", "Q8_0", "Q4_0", "Q4_K_M")


def of_llama_cpp(python: str, ids: list[int], window: int) -> dict[str, Any]:
    """By file type; empty where ``python`` does not have llama.cpp.

    Raises:
        RuntimeError: it has, and something failed.
    """
    with tempfile.TemporaryDirectory(prefix="speccompile-perplexity-") as folder:
        source = Path(folder, "F32.gguf")
        write_rounded(smollm2_gguf(Path(folder)), source, GGMLQuantizationType.F32)
        done = subprocess.run(
            [python, str(WORKER), str(source), folder, str(torch.get_num_threads())],
            input=json.dumps({"ids": ids, "window": window, "kinds": KINDS}),
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"llama.cpp failed: {' '.join(done.stderr.splitlines()[-5:])}")
    found: dict[str, Any] = json.loads(done.stdout)
    return {} if "missing" in found else found


def main(
    text: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="A text file, in UTF-8.")],
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens of it.")] = 8192,
    window: Annotated[int, typer.Option(min=2, help="Tokens that are predicted from what precedes them here.")] = 512,
    calibration: Annotated[Path | None, typer.Option(help="A file of `speccompile calibrate`.")] = None,
    peers_python: Annotated[str | None, typer.Option(help="A Python that has llama.cpp, if not this one.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Compare forms of SmolLM2's weights."""
    with session():
        model, tokenizer = load(SMOLLM2, dtype=torch.float32)
        ids = tokenizer(text.read_text(encoding="utf-8"))["input_ids"][: tokens + 1]
        if len(ids) <= window:
            reason = f"it has {len(ids)} tokens, and a window of {window} needs {window + 1}"
            raise InvalidOption(where="the command line", name="--text", value=str(text), reason=reason)
        found = dict(perplexities(model, torch.tensor(ids), window, calibration, backend))
        with task("measure llama.cpp"):
            peer = of_llama_cpp(peers_python or sys.executable, ids, window)
    lines = {f"speccompile {form}": value for form, value in found.items()}
    lines |= {f"llama.cpp {kind}": math.exp(peer[kind]["loss"]) for kind in KINDS if peer}
    table = Table(title=f"{(len(ids) - 1) // window * window} tokens in windows of {window}", title_justify="left")
    for heading in ("", "perplexity", "to float32"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, value in lines.items():
        table.add_row(name, f"{value:.3f}", f"{value / found['float32']:.3f}x")
    if not peer:
        table.add_row("llama.cpp", NOT_INSTALLED)
    Console().print(table)
    if json_file is not None:
        settings = {"text": str(text), "tokens": len(ids) - 1, "window": window, "calibration": str(calibration)}
        report = {"machine": describe(), "settings": settings, "perplexity": lines, "llama.cpp": peer}
        json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""One measurement in its own process: what a build takes, and the most memory that decoding needed.

``python -m benchmarks.isolated speculator MODEL`` prints one line of JSON. Caches are where the environment says, so
that the caller decides whether they are cold.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import PreTrainedModel, StaticCache

from speccompile import wrap
from speccompile.cli.arguments import STORED
from speccompile.cli.models import load, load_stored
from speccompile.cli.session import parse_options, parse_tiers, session
from speccompile.utils.transformers_version import CACHE

SPECULATOR, COMPILED_FORWARD, TRANSFORMERS = "speculator", "compiled-forward", "transformers"

COMMAND = ["-m", "benchmarks.isolated"]

_PROMPT_TOKENS = 32
_NEW_TOKENS = 16
_ROOT = Path(__file__).resolve().parents[1]


def peak_rss_bytes() -> int:
    """The most memory this process has had, mapped files included."""
    if (peak_kib := _status("VmHWM")) is not None:
        # getrusage would hand down the parent's peak here: on Linux it outlives exec.
        return peak_kib * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def rss_bytes() -> int | None:
    """The memory that this process has now, mapped files included. None where only the peak is known."""
    now_kib = _status("VmRSS")
    return None if now_kib is None else now_kib * 1024


def _status(field: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    line = next(line for line in status.read_text().splitlines() if line.startswith(f"{field}:"))
    return int(line.split()[1])


def run_cold_and_warm(what: str, model: str, arguments: list[str]) -> dict[str, dict[str, Any]]:
    """Two runs of this module, one after the other, over caches that are empty at the start."""
    with tempfile.TemporaryDirectory(prefix="speccompile-bench-") as folder:
        return {heat: run(what, model, arguments, caches(Path(folder))) for heat in ("cold", "warm")}


def caches(folder: Path) -> dict[str, str]:
    """What makes a process keep its caches in ``folder``."""
    return {
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "SPECCOMPILE_CACHE": str(folder / "speccompile"),
    }


def run(what: str, model: str, arguments: list[str], environment: dict[str, str]) -> dict[str, Any]:
    """One run of this module in its own process.

    Raises:
        RuntimeError: with the end of what it wrote to stderr.
    """
    command = [sys.executable, *COMMAND, what, model, *arguments]
    done = subprocess.run(
        command, cwd=_ROOT, env={**os.environ, **environment}, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        said = " ".join(done.stderr.splitlines()[-5:])
        raise RuntimeError(f"measuring {what} of {model} in a process of its own failed: {said}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(
    what: str,
    model: str,
    tiers: Annotated[str, typer.Option()] = "0,1,3,7",
    mode: Annotated[str, typer.Option()] = "ngram",
    max_len: Annotated[int, typer.Option()] = 2048,
    backend: Annotated[str, typer.Option()] = "auto",
    option: Annotated[list[str] | None, typer.Option()] = None,
    free_originals: Annotated[bool, typer.Option()] = False,
    weights: Annotated[str, typer.Option()] = "same",
) -> None:
    if what not in (SPECULATOR, COMPILED_FORWARD, TRANSFORMERS):
        raise typer.BadParameter(f"choose from {SPECULATOR}, {COMPILED_FORWARD}, {TRANSFORMERS}")
    with session():
        form: Any = weights
        if weights == STORED:
            target, _, form = load_stored(model)
        else:
            target, _ = load(model)
        ids = (torch.arange(_PROMPT_TOKENS) % target.config.vocab_size)[None]
        started = time.perf_counter()
        parts: dict[str, float] = {}
        if what == SPECULATOR:
            options = parse_options(option or [])
            draft_lens = parse_tiers(tiers)
            options |= {"free_originals": free_originals, "weights": form}
            spec = wrap(target, mode, tiers=draft_lens, max_len=max_len, backend=backend, **options)
            seconds = time.perf_counter() - started
            parts = spec.build_seconds
            spec.generate(ids, torch.ones_like(ids), max_new_tokens=_NEW_TOKENS)
        elif what == COMPILED_FORWARD:
            seconds = _compile_forward(target, ids, max_len)
        else:
            seconds = 0.0
            target.generate(  # type: ignore[operator]
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=_NEW_TOKENS, do_sample=False
            )
        memory = {"peak_rss_bytes": peak_rss_bytes(), "rss_bytes": rss_bytes()}
        print(json.dumps({"seconds": seconds, "parts": parts, **memory}))


def _compile_forward(model: PreTrainedModel, ids: torch.Tensor, max_len: int) -> float:
    """Seconds of the first call of the compiled forward on one token, over a static cache that holds a prompt."""
    cache = StaticCache(config=model.config, max_cache_len=max_len)
    compiled = torch.compile(model.forward, fullgraph=True)
    with torch.no_grad():
        model(input_ids=ids, use_cache=True, **{CACHE: cache})
        started = time.perf_counter()
        compiled(input_ids=ids[:, :1], use_cache=True, **{CACHE: cache})
        seconds = time.perf_counter() - started
        for _ in range(_NEW_TOKENS):
            compiled(input_ids=ids[:, :1], use_cache=True, **{CACHE: cache})
    return seconds


if __name__ == "__main__":
    typer.run(main)

"""What does drafting with an EAGLE-3 head cost, next to the verify that judges the drafts?

``python -m benchmarks.heads``; see README.md beside this file.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import PreTrainedModel

from benchmarks.machine import describe
from benchmarks.steps import PIPED_WIDTH, SHORT, Work, interleaved, step, tables
from speccompile import Speculator, wrap
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.heads import Eagle3Head, default_taps
from speccompile.utils.progress import task

MAX_LEN = 512


def random_head(model: PreTrainedModel, draft_vocab: int | None) -> Eagle3Head:
    """A head of the model's own sizes; it drafts nonsense, in the time that a good one takes."""
    layers = len(decoder_layers(model)[1])
    taps = default_taps(layers) if layers > 5 else tuple(sorted((0, layers // 2, layers - 1)))
    fields = {} if draft_vocab is None else {"draft_vocab_size": draft_vocab}
    return Eagle3Head.random(model, taps=taps, **fields)


def mebibytes_read(spec: Speculator, draft_len: int) -> tuple[float, float]:
    """Of weights: by one reading of the target, and by drafting and keeping warm, if nothing stays in a cache."""
    graph = spec.engine.tiers[draft_len, 1, "greedy"].graph
    target = drafter = 0
    for node in graph.placeholders:
        port = graph.ports[node.name]
        if port.role != "weight" or port.value is None or not node.users:
            continue
        # An embedding is looked up, not read.
        readers = [user for user in node.users if "embedding" not in str(user.target)]
        if port.name.startswith("drafter_"):
            drafter += len(readers) * port.value.nbytes
        elif readers:
            target += port.value.nbytes
    return target / 2**20, drafter / 2**20


def compare(baseline: Speculator, spec: Speculator, repeats: int) -> dict[str, Any]:
    """``baseline`` has the same tiers without a draft head."""
    draft_len = max(spec.engine.draft_lens)
    verify, whole = f"verify at T={draft_len + 1}", f"the same with {draft_len} drafts made, and the head kept warm"
    alone, warm = "a plain step", "the same with the head kept warm"
    works: dict[str, Work] = {
        verify: step(baseline, draft_len, SHORT),
        whole: step(spec, draft_len, SHORT),
        alone: step(baseline, 0, SHORT),
        warm: step(spec, 0, SHORT),
    }
    taken = interleaved(works, repeats)
    median = {name: statistics.median(values) for name, values in taken.items()}
    least = {name: min(values) for name, values in taken.items()}

    def share(more: str, less: str) -> dict[str, float]:
        return {"median": median[more] / median[less] - 1, "least": least[more] / least[less] - 1}

    target_read, head_read = mebibytes_read(spec, draft_len)
    return {
        "milliseconds": {name: {"median": 1e3 * median[name], "least": 1e3 * least[name]} for name in taken},
        "ratios": {
            f"drafting {draft_len} and keeping warm, to the verify": share(whole, verify),
            "keeping warm, to a plain step": share(warm, alone),
        },
        "mebibytes read": {"verify": target_read, "drafting and keeping warm": head_read},
    }


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    draft_len: Annotated[int, typer.Option(min=1, help="K.")] = 7,
    draft_vocab: Annotated[int | None, typer.Option(help="Tokens that the head knows; all, if not given.")] = None,
    draft_weights: Annotated[str, typer.Option(help="Of the head: same, int8 or int4.")] = "same",
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 40,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time steps with and without a head, in turns."""
    if quick:
        repeats = 2
    with session():
        target, _ = load(model)
        head = random_head(target, draft_vocab)
        options: dict[str, Any] = {"tiers": (0, draft_len), "max_len": MAX_LEN, "backend": backend}
        with (
            wrap(target, "none", **options) as baseline,
            wrap(target, "eagle3_one_model", draft=head, draft_weights=draft_weights, **options) as spec,
        ):
            with task("step by step"), torch.no_grad():
                report = compare(baseline, spec, repeats)
            kernels = spec.explain().partition("kernels")[2].partition("\n")[0].strip()
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(report):
            console.print(table)
        read = report["mebibytes read"]
        console.print("MiB of weights: " + ", ".join(f"{what} {amount:.1f}" for what, amount in read.items()))
        console.print(f"kernels: {kernels}")
        if json_file is not None:
            settings = {"model": model, "draft_len": draft_len, "draft_vocab": draft_vocab, "repeats": repeats}
            settings["draft_weights"] = draft_weights
            settings["kernels"] = kernels
            json_file.write_text(json.dumps({"machine": describe(), "settings": settings, **report}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

"""A token, a verified token and a prompt beside llama.cpp and OpenVINO GenAI, over the same rounded weights.

``python -m benchmarks.peer_steps --weights int4 --peers-python PYTHON``; see README.md beside this file.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from benchmarks.machine import describe
from benchmarks.peer_processes import NOT_INSTALLED, PEERS, peers
from benchmarks.steps import PIPED_WIDTH, PROMPT, SHORT, Ratio, Work, figures, interleaved, read_once, step, tables
from speccompile import Speculator, wrap
from speccompile.cli.measure import TokenTimer, Variant, tier_variant
from speccompile.cli.models import load, load_stored
from speccompile.cli.session import session
from speccompile.errors import InvalidOption
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task
from speccompile.utils.weight_forms import read_weights

#: Draft length of the verified step.
DRAFT_LEN = 7
OURS = "speccompile"


def token(variant: Variant, ids: torch.Tensor, new_tokens: int) -> Work:
    """Seconds of a new token, without the first one, which the pass over the prompt yields."""

    def measure() -> float:
        clock = TokenTimer()
        found = variant.generate(ids, new_tokens, clock)
        return (clock.seconds - clock.first_seconds) / (found.shape[1] - ids.shape[1] - 1)

    return measure


def first_token(variant: Variant, ids: torch.Tensor) -> Work:
    def measure() -> float:
        clock = TokenTimer()
        variant.generate(ids, 2, clock)
        return clock.first_seconds

    return measure


def compare(spec: Speculator, others: list[Variant], new_tokens: int, repeats: int) -> dict[str, Any]:
    """``others`` decode without drafts."""
    generator = torch.Generator().manual_seed(0)
    long = torch.randint(1000, spec.arena.layout.vocab_size, (1, PROMPT), generator=generator)
    variants = {OURS: tier_variant(spec, 0)} | {variant.name: variant for variant in others}
    tokens = {f"{name}, a token": token(variant, long[:, :SHORT], new_tokens) for name, variant in variants.items()}
    prompts = {f"{name}, a prompt": first_token(variant, long) for name, variant in variants.items()}
    narrow, wide, floor = f"{OURS}, K=0", f"{OURS}, K={DRAFT_LEN}", "its weights, read once by torch"
    steps = {narrow: step(spec, 0, SHORT), wide: step(spec, DRAFT_LEN, SHORT), floor: read_once(spec)}
    taken = interleaved(tokens, repeats) | interleaved(prompts, repeats) | interleaved(steps, 4 * repeats)
    wanted = [Ratio(f"T={DRAFT_LEN + 1} to T=1", wide, narrow), Ratio("K=0 to its weights", narrow, floor)]
    for what in ("a token", "a prompt"):
        wanted += [Ratio(f"{what}, {name} to {OURS}", f"{name}, {what}", f"{OURS}, {what}") for name in variants][1:]
    return figures(taken, wanted)


def main(
    model: Annotated[str, typer.Option(help="smollm2, or a GGUF file, which the peers then read as it is.")] = SMOLLM2,
    weights: Annotated[str, typer.Option(help="int8 or int4.")] = "int4",
    stored: Annotated[bool, typer.Option("--stored", help="Keep the integers of a GGUF file.")] = False,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens whose mean is the time of one.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 10,
    peers_python: Annotated[str | None, typer.Option(help="A Python that has the peers, if not this one.")] = None,
    quick: Annotated[bool, typer.Option(help="Two of each, to see that it runs.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time a token, a verified step and a prompt of 600 tokens, in turns."""
    if quick:
        repeats, new_tokens = 2, 8
    with session():
        form = read_weights("the command line", "--weights", weights)
        if form not in PEERS:
            reason = f"choose from {', '.join(PEERS)}"
            raise InvalidOption(where="the command line", name="--weights", value=weights, reason=reason)
        started, packs = time.perf_counter(), dict[str, Any]()
        if stored:
            target, _, packs["weights"] = load_stored(model)
        else:
            target, _ = load(model)
            packs["weights"] = form
        # All texts have the same length.
        target.generation_config.eos_token_id = None
        gguf = None if model == SMOLLM2 else Path(model)
        max_len, threads = PROMPT + new_tokens, torch.get_num_threads()
        with (
            wrap(target, "ngram", tiers=(0, DRAFT_LEN), max_len=max_len, prefix_reuse=False, **packs) as spec,
            peers(peers_python or sys.executable, threads, form, (0,), max_len, gguf) as others,
        ):
            loaded = {
                "seconds to load and wrap": time.perf_counter() - started,
                "peak MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
            }
            variants = [peer.variant([]) for peer in others if peer.installed]
            with task("token by token"):
                report = compare(spec, variants, new_tokens, repeats)
            kernels = spec.explain().partition("kernels")[2].partition("\n")[0].strip()
            versions = {peer.name: peer.installed or NOT_INSTALLED for peer in others}
        console = Console(width=None if sys.stdout.isatty() else PIPED_WIDTH)
        for table in tables(report):
            console.print(table)
        console.print(f"kernels: {kernels}")
        console.print(", ".join(f"{what}: {value:.0f}" for what, value in loaded.items()))
        for name, version in versions.items():
            typer.echo(f"{name}: {version}")
        if json_file is not None:
            settings = {"model": Path(model).name, "weights": form, "repeats": repeats, "new_tokens": new_tokens}
            settings |= {"kernels": kernels, "prompt": PROMPT, "context": SHORT, "stored": stored}
            report = {"machine": describe(), "peers": versions, "settings": settings, "loaded": loaded, **report}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

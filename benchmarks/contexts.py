"""A prompt and the tokens after it beside llama.cpp and OpenVINO GenAI, by the length of the context.

``python -m benchmarks.contexts --peers-python PYTHON``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.peer_processes import EIGHT_BITS, NOT_INSTALLED, Peer, peers
from speccompile import wrap
from speccompile.cli.measure import TokenTimer, Variant, tier_variant
from speccompile.cli.models import load
from speccompile.cli.session import session
from speccompile.utils.kv_forms import KV_FORMS
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task

CONTEXTS = [200, 600, 1000, 4000, 8000]
LONG = 4000
#: Milliseconds.
Figures = dict[str, dict[str, float]]


def measure(variant: Variant, ids: torch.Tensor, new_tokens: int) -> tuple[float, float]:
    """Milliseconds of the prompt with the first token, and of a token after it."""
    clock = TokenTimer()
    found = variant.generate(ids, new_tokens, clock)
    after = found.shape[1] - ids.shape[1] - 1
    return clock.first_seconds * 1000, (clock.seconds - clock.first_seconds) / after * 1000


def compare(variants: list[Variant], contexts: list[int], vocab: int, new_tokens: int, repeats: int) -> dict[str, Any]:
    """The medians of each variant at each context, in turns."""
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, Figures]] = {"prompt": {}, "token": {}}
    for context in contexts:
        ids = torch.randint(1000, vocab, (1, context), generator=generator)
        taken: dict[str, list[tuple[float, float]]] = {variant.name: [] for variant in variants}
        for turn in range(repeats + 1 if context < LONG else repeats):
            for variant in variants:
                figures = measure(variant, ids, new_tokens)
                # The first turn is for caches and clocks, which long prompts do not need.
                if turn or context >= LONG:
                    taken[variant.name].append(figures)
        for at, what in enumerate(found):
            found[what][str(context)] = {
                name: {"median": statistics.median(of := [pair[at] for pair in pairs]), "least": min(of)}
                for name, pairs in taken.items()
            }
    return found


def table(report: dict[str, Any], what: str, names: list[str]) -> Table:
    shown = Table(title=f"milliseconds of a {what} (median), in turns", title_justify="left")
    for heading in ("context", *names):
        shown.add_column(heading, justify="right")
    for context, figures in report[what].items():
        shown.add_row(context, *(f"{figures[name]['median']:.2f}" for name in names))
    return shown


@contextlib.contextmanager
def others(python: str, max_len: int, threads: int) -> Iterator[list[Peer]]:
    """llama.cpp with KV in 16 and in 8 bits, and OpenVINO."""
    with peers(python, threads, "int4", (0,), max_len, kvs=("", EIGHT_BITS)) as started:
        yield started


def main(
    model: Annotated[str, typer.Option(help="smollm2; the peers read the same weights, rounded to 4 bits.")] = SMOLLM2,
    kv: Annotated[list[str] | None, typer.Option(help=f"May repeat. {', '.join(KV_FORMS)}.")] = None,
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16 or float16.")] = "float32",
    paged: Annotated[bool, typer.Option("--paged", help="KV in pages of one pool.")] = False,
    context: Annotated[list[int] | None, typer.Option(min=1, help="May repeat. 200 to 8,000.")] = None,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens whose mean is the time of one.")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 3,
    peers_python: Annotated[str | None, typer.Option(help="A Python that has the peers, if not this one.")] = None,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time prompts of random tokens, and the tokens after them, without drafts."""
    contexts, forms = context or CONTEXTS, kv or ["float16"]
    max_len, threads = max(contexts) + new_tokens, torch.get_num_threads()
    with session(), contextlib.ExitStack() as opened:
        target, _ = load(model)
        target.to(getattr(torch, dtype))
        # All texts have the same length.
        target.generation_config.eos_token_id = None
        variants = []
        for form in forms:
            options: dict[str, Any] = {"kv_memory": max_len + 128} if paged else {}
            options |= {"weights": "int4", "max_len": max_len, "kv": form, "prefix_reuse": False, "tiers": (0,)}
            spec = opened.enter_context(wrap(target, "none", **options))
            variants.append(Variant(f"speccompile, {form}", tier_variant(spec, 0).generate))
        started = opened.enter_context(others(peers_python or sys.executable, max_len, threads))
        variants += [peer.variant([]) for peer in started if peer.installed]
        names = [variant.name for variant in variants]
        with task("token by token"):
            report = compare(variants, contexts, target.config.vocab_size, new_tokens, repeats)
        versions = {peer.name: peer.installed or NOT_INSTALLED for peer in started}
        for what in report:
            Console().print(table(report, what, names))
        if json_file is not None:
            settings = {
                "model": model,
                "dtype": dtype,
                "kv": forms,
                "paged": paged,
                "new_tokens": new_tokens,
                "repeats": repeats,
            }
            report = {"machine": describe(), "peers": versions, "settings": settings, "milliseconds": report}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

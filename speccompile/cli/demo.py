"""``speccompile demo``: a real model speculates, with the same text as transformers, and how much faster that is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

from speccompile import Speculator, modes, wrap
from speccompile.cli.generate import Backend, Mode, Tiers
from speccompile.cli.measure import (
    NEAR_TIE,
    TRANSFORMERS,
    Run,
    Summary,
    Variant,
    differences,
    measure,
    tier_name,
    tier_variant,
    transformers_variant,
)
from speccompile.cli.models import encode, load, max_len_for
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import BUILT_IN, Prompt, read_prompts
from speccompile.cli.session import parse_tiers, session


def command(
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 64,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of your own: Spec-Bench's or HumanEval's JSON lines.")
    ] = None,
    model: Annotated[str, typer.Option(help="smollm2, tiny (random weights), a local folder or a hub id.")] = "smollm2",
    mode: Mode = "ngram",
    tiers: Tiers = "0,1,3,7",
    backend: Backend = "auto",
) -> None:
    """Compare speculative decoding at each tier with transformers' generate: speed, and that the text is the same."""
    with session():
        draft_lens = parse_tiers(tiers)
        modes.create(mode, {})
        chosen = read_prompts(prompts) if prompts else list(BUILT_IN)
        target, tokenizer = load(model)
        ids = [encode(tokenizer, prompt.text, prompt.chat).to(target.device) for prompt in chosen]
        max_len = max_len_for(ids, new_tokens)
        with wrap(target, mode, tiers=draft_lens, max_len=max_len, backend=backend, prefix_reuse=False) as spec:
            parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spec.build_seconds.items())
            typer.echo(f"built in {sum(spec.build_seconds.values()):.1f} s ({parts})\n")
            typer.echo(f"> {chosen[0].text}\n")
            streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
            spec.generate(ids[0], torch.ones_like(ids[0]), max_new_tokens=new_tokens, streamer=streamer)
            runs = _measure(spec, transformers_variant(target), ids, new_tokens)
        _show_table(runs, chosen)
        largest = tier_name(max(draft_lens))
        typer.echo(f"acceptance length {Summary(runs[largest]).acceptance_length:.2f} with {largest}")
        found = [
            (name, difference)
            for name in runs
            for difference in differences(target, ids, runs[TRANSFORMERS], runs[name])
        ]
        for name, difference in found:
            typer.echo(f"{name}, {difference}")
        typer.echo(f"same tokens as transformers generate: {'no' if found else 'yes'}")
        if any(difference.logit_change >= NEAR_TIE for _, difference in found):
            raise typer.Exit(1)


def _measure(
    spec: Speculator, reference: Variant, prompts: Sequence[torch.Tensor], new_tokens: int
) -> dict[str, list[Run]]:
    variants = [reference, *(tier_variant(spec, draft_len) for draft_len in spec.tiers)]
    total = len(variants) * (len(prompts) + 1)
    with count_runs("Measuring, prompt by prompt", total) as after_run:
        return measure(variants, prompts, new_tokens, after_run)


def _show_table(runs: dict[str, list[Run]], prompts: Sequence[Prompt]) -> None:
    reference = Summary(runs[TRANSFORMERS])
    table = Table(title=f"{len(prompts)} prompts: {', '.join(prompt.name for prompt in prompts[:6])}")
    table.add_column("")
    for heading in ("tokens/s", "ratio", "acceptance length", "same tokens"):
        table.add_column(heading, justify="right")
    for name, own in runs.items():
        summary = Summary(own)
        same = sum(run.tokens == expected.tokens for run, expected in zip(own, reference.runs, strict=True))
        table.add_row(
            name,
            f"{summary.tokens_per_second:.1f}",
            f"{summary.tokens_per_second / reference.tokens_per_second:.2f}x",
            f"{summary.acceptance_length:.2f}",
            "-" if name == TRANSFORMERS else f"{same} of {len(own)}",
        )
    Console().print(table)

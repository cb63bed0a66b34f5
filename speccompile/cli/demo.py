"""``speccompile demo``: speculate with a real model, and compare text and speed with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from transformers import TextStreamer

from speccompile import Speculator, modes, wrap
from speccompile.cli.devices import choose_device
from speccompile.cli.measure import (
    NEAR_TIE,
    TRANSFORMERS,
    Run,
    Summary,
    differences,
    measure,
    tier_name,
    tier_variant,
    transformers_variant,
)
from speccompile.cli.models import encode, load, max_len_for
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import BUILT_IN, NamedPrompt, read_prompts
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions

#: Mode of a head, and its draft length: later drafts of a small head are seldom accepted.
HEAD_MODE, HEAD_DRAFT_LEN = "eagle3_one_model", 3


def run(
    model: str,
    options: WrapOptions,
    device: str | None,
    *,
    head: Path | None,
    prompts: Path | None,
    new_tokens: int,
) -> None:
    """See ``speccompile demo --help``. ``prompts``: None are the built-in ones."""
    with session(), ExitStack() as wrapped:
        modes.create(options.mode, {})
        chosen = read_prompts(prompts) if prompts else list(BUILT_IN)
        target, tokenizer = load(model, choose_device(device, options.backend))
        ids = [encode(tokenizer, prompt.text, prompt.chat).to(target.device) for prompt in chosen]
        options = replace(options, max_len=max_len_for(ids, new_tokens))
        spec = wrapped.enter_context(wrap(target, **options.arguments()))
        variants = [transformers_variant(target), *(tier_variant(spec, draft_len) for draft_len in spec.tiers)]
        _show_build(spec)
        if head is not None:
            own = replace(options, mode=HEAD_MODE, tiers=(0, HEAD_DRAFT_LEN)).arguments()
            drafting = wrapped.enter_context(wrap(target, draft=str(head), **own))
            _show_build(drafting)
            variants.append(tier_variant(drafting, HEAD_DRAFT_LEN, f"EAGLE-3 head K={HEAD_DRAFT_LEN}"))
        typer.echo(f"> {chosen[0].text}\n")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        spec.generate(ids[0], torch.ones_like(ids[0]), max_new_tokens=new_tokens, streamer=streamer)
        with count_runs("Measuring, prompt by prompt", len(variants) * (len(ids) + 1)) as after_run:
            runs = measure(variants, ids, new_tokens, after_run)
        _show_table(runs, chosen)
        _show_categories(runs, chosen)
        largest = tier_name(max(options.draft_lens))
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


def _show_build(spec: Speculator) -> None:
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spec.build_seconds.items())
    typer.echo(f"built in {sum(spec.build_seconds.values()):.1f} s ({parts})\n")


def _show_table(runs: dict[str, list[Run]], prompts: Sequence[NamedPrompt]) -> None:
    """``kernels``: K=0 over transformers; ``speculation``: a tier over K=0; ``both``: their product."""
    reference = Summary(runs[TRANSFORMERS])
    # The seven columns must fit a terminal of 80 characters.
    title = f"{len(prompts)} prompts: {', '.join(prompt.name for prompt in prompts[:6])}"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for heading in ("tokens/s", "kernels", "speculation", "both", "acceptance\nlength", "same\ntokens"):
        table.add_column(heading, justify="right", no_wrap=True)
    baseline = Summary(runs[tier_name(0)])
    kernels = _ratio(baseline, reference)
    for name, own in runs.items():
        summary = Summary(own)
        is_reference = name == TRANSFORMERS
        same = sum(run.tokens == expected.tokens for run, expected in zip(own, reference.runs, strict=True))
        table.add_row(
            name,
            f"{summary.tokens_per_second:.1f}",
            "-" if is_reference else kernels,
            "-" if is_reference or name == tier_name(0) else _ratio(summary, baseline),
            _ratio(summary, reference),
            f"{summary.acceptance_length:.2f}",
            "-" if is_reference else f"{same} of {len(own)}",
        )
    Console().print(table)
    typer.echo("kernels: K=0 / transformers; speculation: K / K=0; both: K / transformers")


def _show_categories(runs: Mapping[str, Sequence[Run]], prompts: Sequence[NamedPrompt]) -> None:
    """Show results by category of prompt: acceptance depends on the kind of text."""
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    if len(categories) < 2:
        return
    table = Table(title="acceptance length", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for category in categories:
        table.add_column(category, justify="right")
    for name, own in runs.items():
        if name not in (TRANSFORMERS, tier_name(0)):
            pairs = list(zip(own, prompts, strict=True))
            summaries = [Summary([run for run, prompt in pairs if prompt.category == c]) for c in categories]
            table.add_row(name, *[f"{summary.acceptance_length:.2f}" for summary in summaries])
    Console().print(table)


def _ratio(summary: Summary, base: Summary) -> str:
    return f"{summary.tokens_per_second / base.tokens_per_second:.2f}x"

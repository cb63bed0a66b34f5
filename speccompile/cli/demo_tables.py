"""The tables of ``speccompile demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from speccompile.cli.measure import TRANSFORMERS, Run, Summary, tier_name
from speccompile.cli.prompts import NamedPrompt


def show_table(runs: dict[str, list[Run]], prompts: Sequence[NamedPrompt]) -> None:
    """``kernels``: K=0 over transformers; ``speculation``: a tier over K=0; ``both``: their product."""
    reference = Summary(runs[TRANSFORMERS])
    # The seven columns must fit a terminal of 80 characters.
    more = ", ..." if len(prompts) > 6 else ""
    title = f"{len(prompts)} prompts: {', '.join(prompt.name for prompt in prompts[:6])}{more}"
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


def show_categories(runs: Mapping[str, Sequence[Run]], prompts: Sequence[NamedPrompt]) -> None:
    """Show acceptance length and speed over K=0 by category of prompt: both depend on the kind of text."""
    categories = list(dict.fromkeys(prompt.category for prompt in prompts))
    if len(categories) < 2:
        return

    def of(name: str, category: str) -> Summary:
        return Summary([run for run, prompt in zip(runs[name], prompts, strict=True) if prompt.category == category])

    title = "acceptance length, and speed over K=0"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    for category in categories:
        table.add_column(category, justify="right")
    for name in runs:
        if name not in (TRANSFORMERS, tier_name(0)):
            cells = [(of(name, category), of(tier_name(0), category)) for category in categories]
            table.add_row(name, *[f"{own.acceptance_length:.2f}  {_ratio(own, plain)}" for own, plain in cells])
    Console().print(table)


def _ratio(summary: Summary, base: Summary) -> str:
    return f"{summary.tokens_per_second / base.tokens_per_second:.2f}x"

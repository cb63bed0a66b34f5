"""Time of a step with keys and values of each form, by context and draft length.

``python -m benchmarks.kv_forms``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table

from benchmarks.machine import describe
from benchmarks.steps import Ratio, figures, interleaved, step
from speccompile import wrap
from speccompile.cli.models import load
from speccompile.cli.session import parse_tiers, session
from speccompile.utils.kv_forms import KV_FORMS

SAME = KV_FORMS[0]


def table(report: dict[str, Any], contexts: list[int], draft_lens: tuple[int, ...]) -> Table:
    shown = Table(title="milliseconds (median), interleaved", title_justify="left")
    for heading in ("context", "K", *KV_FORMS):
        shown.add_column(heading, justify="right")
    for context in contexts:
        for draft_len in draft_lens:
            cells = (report["milliseconds"][name(form, draft_len, context)]["median"] for form in KV_FORMS)
            shown.add_row(str(context), str(draft_len), *map("{:.2f}".format, cells))
    return shown


def name(form: str, draft_len: int, context: int) -> str:
    return f"{form}, K={draft_len}, context {context}"


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    mode: Annotated[str, typer.Option(help="How to draft.")] = "ngram",
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,3,7",
    weights: Annotated[str, typer.Option(help="same, int8 or int4.")] = "int4",
    dtype: Annotated[str, typer.Option(help="Of the model: float32, bfloat16 or float16.")] = "float32",
    context: Annotated[list[int] | None, typer.Option(min=1, help="May repeat. 200, 1000, 4000 and 8000.")] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Of each.")] = 20,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Time steps over keys and values of each form, in turns."""
    with session(), contextlib.ExitStack() as opened:
        target, _ = load(model)
        target.to(getattr(torch, dtype))
        draft_lens, contexts = parse_tiers(tiers), context or [200, 1000, 4000, 8000]
        options: dict[str, Any] = {"tiers": draft_lens, "weights": weights, "max_len": max(contexts) + 64}
        wrapped = {form: opened.enter_context(wrap(target, mode, kv=form, **options)) for form in KV_FORMS}
        works, wanted = {}, []
        for length in contexts:
            for draft_len in draft_lens:
                for form, spec in wrapped.items():
                    works[name(form, draft_len, length)] = step(spec, draft_len, length)
                    if form != SAME:
                        of, to = (name(each, draft_len, length) for each in (form, SAME))
                        wanted.append(Ratio(f"{of}, to {SAME}", of, to))
        report = figures(interleaved(works, repeats), wanted)
        Console().print(table(report, contexts, draft_lens))
        if json_file is not None:
            settings = {
                "model": model,
                "mode": mode,
                "weights": weights,
                "dtype": dtype,
                "tiers": tiers,
                "repeats": repeats,
            }
            report = {"machine": describe(), "settings": settings, **report}
            json_file.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

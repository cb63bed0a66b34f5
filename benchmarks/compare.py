"""The same prompts through transformers' ways to decode and ours, interleaved in one process.

``python -m benchmarks.compare --prompts FILE --count 24``; see README.md beside this file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import CompileConfig, PreTrainedModel

from benchmarks import isolated
from benchmarks.machine import describe
from benchmarks.prompts import choose_prompts, name_of
from benchmarks.report import Comparison, build_table, categories_table, runs_table
from speccompile import Speculator, modes, wrap
from speccompile.cli.measure import (
    TRANSFORMERS,
    TokenTimer,
    Variant,
    differences,
    measure,
    tier_variant,
    transformers_variant,
)
from speccompile.cli.models import encode, load
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import NamedPrompt
from speccompile.cli.session import parse_options, parse_tiers, session
from speccompile.errors import InvalidOption
from speccompile.pretrained import fetch_smollm2
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.progress import task

STATIC = "static cache + torch.compile"
LOOKUP = "prompt lookup"
VARIANTS = ("static", "lookup", "ours")

_PIPED_WIDTH = 140


def make_variants(model: PreTrainedModel, spec: Speculator, names: Sequence[str]) -> list[Variant]:
    """transformers' eager generate, which everything is held against, and the variants called ``names``.

    Raises:
        InvalidOption: there is no variant of that name.
    """
    variants = [transformers_variant(model)]
    for name in names:
        if name == "static":
            compiled = CompileConfig(mode="default")
            # transformers compiles by itself on accelerators only.
            compiled._compile_all_devices = True  # type: ignore[assignment]
            variants.append(transformers_variant(model, STATIC, cache_implementation="static", compile_config=compiled))
        elif name == "lookup":
            draft_len = max(1, *spec.tiers)
            variants.append(transformers_variant(model, LOOKUP, prompt_lookup_num_tokens=draft_len))
        elif name == "ours":
            variants.extend(tier_variant(spec, draft_len) for draft_len in spec.tiers)
    return variants


def parse_variants(text: str) -> list[str]:
    """Raises InvalidOption when there is no variant of that name."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in VARIANTS:
            raise InvalidOption(
                where="the command line", name="--variants", value=name, reason=f"choose from {', '.join(VARIANTS)}"
            )
    return names


def compare(
    model: PreTrainedModel,
    variants: Sequence[Variant],
    prompts: Sequence[NamedPrompt],
    ids: Sequence[torch.Tensor],
    new_tokens: int,
    after_run: Callable[[], None] = lambda: None,
) -> Comparison:
    """Run everything; ``ids`` (``[1, P]`` each) are the ``prompts`` as tokens, the first variant is the reference."""
    warm_up: dict[str, float] = {}
    for variant in variants:
        if variant.name == STATIC:
            # Its cache takes the size of the longest text, and its code with it; later calls reuse both.
            longest = max(ids, key=lambda item: item.shape[1])
            started = time.perf_counter()
            with task(f"compile {variant.name}"):
                variant.generate(longest, new_tokens, TokenTimer())
            warm_up[variant.name] = time.perf_counter() - started
    runs = measure(variants, ids, new_tokens, after_run)
    found = {name: differences(model, ids, runs[variants[0].name], own) for name, own in runs.items()}
    return Comparison(prompts, runs, found, warm_up)


def measure_builds(
    model: str, arguments: list[str], max_len: int, *, skip_compile: bool, free_originals: bool
) -> dict[str, dict[str, Any]]:
    """Build seconds, cold and warm, and peak memory, each in its own process."""
    # Under its name the model would be fetched again, since the caches are fresh.
    path = str(fetch_smollm2()) if model == SMOLLM2 else model
    builds: dict[str, dict[str, Any]] = {}
    with task("measure memory of transformers generate"):
        builds[TRANSFORMERS] = {"warm": isolated.run(isolated.TRANSFORMERS, path, [], {})}
    with task("measure a cold and a warm build"):
        builds["speccompile"] = isolated.run_cold_and_warm(isolated.SPECULATOR, path, arguments)
    if free_originals:
        with task("measure memory with free_originals=True"):
            freed = isolated.run(isolated.SPECULATOR, path, [*arguments, "--free-originals"], {})
            builds["speccompile, free_originals=True"] = {"warm": freed}
    if not skip_compile:
        with task("measure torch.compile of the whole forward, cold and warm"):
            builds["torch.compile of the forward"] = isolated.run_cold_and_warm(
                isolated.COMPILED_FORWARD, path, ["--max-len", str(max_len)]
            )
    return builds


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a prompt.")] = 64,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7",
    mode: Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes.available())}.")] = "ngram",
    option: Annotated[list[str] | None, typer.Option(help="An option of the mode, name=value; may repeat.")] = None,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    variants: Annotated[str, typer.Option(help="Besides transformers generate.")] = ",".join(VARIANTS),
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
    skip_compile: Annotated[bool, typer.Option(help="Leave out torch.compile of transformers' forward.")] = False,
    free_originals: Annotated[bool, typer.Option(help="Measure the memory of wrap(free_originals=True), too.")] = False,
    skip_build: Annotated[bool, typer.Option(help="Leave out builds and memory in processes of their own.")] = False,
) -> None:
    """Compare ways to decode the same prompts."""
    with session():
        names = [name for name in parse_variants(variants) if not (skip_compile and name == "static")]
        draft_lens, options = parse_tiers(tiers), parse_options(option or [])
        modes.create(mode, options)
        chosen = choose_prompts(prompts, count)
        target, tokenizer = load(model)
        kept = [(prompt, encode(tokenizer, prompt.text, prompt.chat)) for prompt in chosen]
        kept = [(prompt, ids.to(target.device)) for prompt, ids in kept if ids.shape[1] + new_tokens <= max_len]
        if not kept:
            raise InvalidOption(
                where="the command line", name="--max-len", value=max_len, reason="no prompt is short enough for it"
            )
        if len(kept) < len(chosen):
            typer.echo(f"left out {len(chosen) - len(kept)} prompts that are too long for --max-len {max_len}")
        # In a file or a pipe there is no width to keep to, and rich would cut names off at 80.
        console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        options |= {"prefix_reuse": False}
        with wrap(target, mode, tiers=draft_lens, max_len=max_len, backend=backend, **options) as spec:
            contenders = make_variants(target, spec, names)
            with count_runs("Measuring, prompt by prompt", len(contenders) * (len(kept) + 1)) as after_run:
                texts, ids = zip(*kept, strict=True)
                comparison = compare(target, contenders, texts, ids, new_tokens, after_run)
            explanation = spec.explain()
        machine = describe() | {"peak_rss_bytes": isolated.peak_rss_bytes()}
        _show(console, comparison, machine)
        builds: dict[str, dict[str, Any]] = {}
        if not skip_build:
            arguments = ["--tiers", tiers, "--mode", mode, "--max-len", str(max_len), "--backend", backend]
            arguments += [text for item in option or [] for text in ("--option", item)]
            builds = measure_builds(model, arguments, max_len, skip_compile=skip_compile, free_originals=free_originals)
            console.print(build_table(builds))
        if json_file is not None:
            settings = {"model": model, "mode": mode, "options": options, "tiers": draft_lens, "max_len": max_len}
            settings |= {"new_tokens": new_tokens, "prompts": name_of(prompts), "count": len(kept)}
            report = {"machine": machine, "settings": settings, "explain": explanation, "builds": builds}
            json_file.write_text(json.dumps(report | comparison.as_json(), indent=1) + "\n")


def _show(console: Console, comparison: Comparison, machine: dict[str, Any]) -> None:
    console.print(runs_table(comparison))
    if len({prompt.category for prompt in comparison.prompts}) > 1:
        console.print(categories_table(comparison))
    for name, found in comparison.differences.items():
        for difference in found:
            typer.echo(f"{name}, {difference}")
    for name, seconds in comparison.warm_up_seconds.items():
        typer.echo(f"{name}: first call {seconds:.1f} s, compile included")
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    typer.echo(f"{machine['cpu']}, {machine['torch_threads']} torch threads; {versions}")
    typer.echo(f"peak memory of this process, all variants together: {machine['peak_rss_bytes'] / 2**20:,.0f} MiB")


if __name__ == "__main__":
    typer.run(main)

"""``speccompile demo``: speculate with a real model, and compare text and speed with transformers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import typer
from transformers import TextStreamer

from speccompile import Speculator, modes, wrap
from speccompile.cli.demo_tables import show_categories, show_table
from speccompile.cli.devices import choose_device
from speccompile.cli.measure import (
    NEAR_TIE,
    TRANSFORMERS,
    Continued,
    Run,
    Summary,
    Variant,
    differences,
    measure,
    policy_variant,
    tier_name,
    tier_variant,
    transformers_variant,
)
from speccompile.cli.models import encode, load, max_len_for
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import BUILT_IN, read_prompts
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions
from speccompile.policies import LearningPolicy

#: Mode of a head, and its draft length: later drafts of a small head are seldom accepted.
HEAD_MODE, HEAD_DRAFT_LEN = "eagle3_one_model", 3
#: The head after lookups, which cost less.
COMPOSED = ["suffix", HEAD_MODE]


@dataclass(frozen=True)
class Way:
    """A wrapped model under a policy: a row of the table, and the call of ``wrap`` that it stands for."""

    variant: Variant
    call: str


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
        ways = {}

        def add(options: WrapOptions, label: str, **draft: Any) -> Speculator:
            spec = wrapped.enter_context(wrap(target, **options.arguments(), **draft))
            _show_build(spec)
            ways.update({way.variant.name: way for way in _ways_of(spec, options.mode, label, **draft)})
            return spec

        spec = add(options, "speccompile")
        if head is not None:
            of_head = replace(options, tiers=(0, HEAD_DRAFT_LEN))
            add(replace(of_head, mode=HEAD_MODE), "EAGLE-3 head", draft=str(head))
            add(replace(of_head, mode=COMPOSED), "suffix + head", draft=str(head))
        variants = [transformers_variant(target), *(way.variant for way in ways.values())]
        typer.echo(f"> {chosen[0].text}\n")
        streamer = TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
        spec.generate(ids[0], torch.ones_like(ids[0]), max_new_tokens=new_tokens, streamer=streamer)
        with count_runs("Measuring, prompt by prompt", len(variants) * (len(ids) + 1)) as after_run:
            runs = measure(variants, ids, new_tokens, after_run)
        show_table(runs, chosen)
        show_categories(runs, chosen)
        typer.echo(_fastest(runs, ways))
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


def _ways_of(spec: Speculator, mode: str | Sequence[str] | None, label: str, **draft: Any) -> list[Way]:
    """Every tier of ``spec``, and its own policy if that chooses among them. K=0 of a network's modes is left out."""

    def way(variant: Variant, policy: object) -> Way:
        given = "".join(f", {name}={value!r}" for name, value in draft.items())
        return Way(variant, f"wrap(model, {mode!r}{given}, tiers={tuple(spec.tiers)}, policy={str(policy)!r})")

    lens = [draft_len for draft_len in spec.tiers if draft_len or not draft]
    found = [way(tier_variant(spec, k, f"{label} K={k}"), f"fixed:{k}") for k in lens]
    policy = spec.engine.policy
    if isinstance(policy, LearningPolicy):
        found.append(way(policy_variant(spec, Continued(policy), f"{label} {policy}"), policy))
    return found


def _fastest(runs: Mapping[str, list[Run]], ways: Mapping[str, Way]) -> str:
    """Return the line that states what to choose for prompts like these."""
    name = max(ways, key=lambda name: Summary(runs[name]).tokens_per_second)
    return f"fastest: {name}\n    {ways[name].call}"


def _show_build(spec: Speculator) -> None:
    parts = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in spec.build_seconds.items())
    typer.echo(f"built in {sum(spec.build_seconds.values()):.1f} s ({parts})\n")

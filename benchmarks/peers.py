"""speccompile on a CPU beside what else there is: transformers' three ways to decode, llama.cpp and OpenVINO GenAI.

``python -m benchmarks.peers --prompts spec_bench.jsonl``; see README.md beside this file.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.compare import LOOKUP, compare, make_variants
from benchmarks.machine import describe
from benchmarks.peer_processes import NOT_INSTALLED, PEERS, drafted, eos_of, peers
from benchmarks.prompts import choose_prompts, name_of
from benchmarks.report import Comparison, runs_table
from speccompile import Speculator, wrap
from speccompile.cli.measure import TRANSFORMERS, Run, Summary, Variant, tier_variant
from speccompile.cli.models import encode
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import NamedPrompt
from speccompile.cli.session import parse_tiers, session
from speccompile.errors import InvalidOption
from speccompile.pretrained import load
from speccompile.utils.model_names import SMOLLM2
from speccompile.utils.weight_forms import WeightForm, read_weights

PLAIN, NGRAM = "speccompile K=0", "speccompile ngram"
#: Rounded weights, by form: without drafts, and with them.
ROUNDED = {form: f"speccompile {form} K=0" for form in PEERS}
DRAFTED = {form: f"speccompile {form} ngram" for form in PEERS}
#: Kinds of prompts whose answers quote them.
QUOTING = ("summarization", "rag", "extraction")
_PIPED_WIDTH = 140


@dataclass(frozen=True)
class Claim:
    """Decode tokens/s of ``of`` are at least ``least`` times those of ``to``."""

    of: str
    to: str
    least: float
    categories: tuple[str, ...] = ()

    def ratio(self, comparison: Comparison) -> float:
        rates = [
            Summary(list(_of(comparison, name, self.categories))).decode_tokens_per_second
            for name in (self.of, self.to)
        ]
        return rates[0] / rates[1] if rates[1] else 0.0


CLAIMS = (
    Claim(PLAIN, TRANSFORMERS, 1.6),
    *(Claim(NGRAM, TRANSFORMERS, 2.5, (category,)) for category in QUOTING),
    *(Claim(NGRAM, LOOKUP, 1.5, (category,)) for category in QUOTING),
    Claim(ROUNDED["int8"], PLAIN, 1.5),
    *(Claim(ROUNDED["int4"], peer, 1.1) for peer in PEERS["int4"].values()),
    *(Claim(DRAFTED[form], drafted(peer), 1.0) for form, own in PEERS.items() for peer in own.values()),
)


def _of(comparison: Comparison, name: str, categories: Sequence[str]) -> Iterator[Run]:
    for prompt, run in zip(comparison.prompts, comparison.runs[name], strict=True):
        if not categories or prompt.category in categories:
            yield run


def own_variants(spec: Speculator, plain: str, with_drafts: str) -> list[Variant]:
    """Without drafts, and with at most as many as the largest tier has, by these names."""
    named = {plain: tier_variant(spec, 0), with_drafts: tier_variant(spec, max(spec.tiers))}
    return [replace(variant, name=name) for name, variant in named.items()]


def claim_rows(comparison: Comparison) -> list[dict[str, Any]]:
    """What is claimed, as far as there were prompts of its kind, and what was measured."""
    measured = {prompt.category for prompt in comparison.prompts}
    return [
        {
            "claim": f"{claim.of} / {claim.to}",
            "prompts": ", ".join(claim.categories) or "all",
            "ratio": claim.ratio(comparison),
            "wanted": claim.least,
        }
        for claim in CLAIMS
        if {claim.of, claim.to} <= comparison.runs.keys() and set(claim.categories) <= measured
    ]


def rates(comparison: Comparison) -> list[dict[str, Any]]:
    """Decode tokens/s, and seconds to the first token, of every line by category."""
    categories = [(), *((category,) for category in dict.fromkeys(prompt.category for prompt in comparison.prompts))]
    rows = []
    for name in comparison.runs:
        for chosen in categories:
            summary = Summary(list(_of(comparison, name, chosen)))
            rows.append(
                {
                    "line": name,
                    "prompts": ", ".join(chosen) or "all",
                    "decode_tokens_per_second": summary.decode_tokens_per_second,
                    "first_token_seconds": summary.first_seconds,
                    "acceptance_length": summary.acceptance_length,
                }
            )
    return rows


def rates_table(comparison: Comparison, missing: Sequence[str]) -> Table:
    """Decode tokens/s (seconds to the first token) by category."""
    rows = rates(comparison)
    kinds = list(dict.fromkeys(row["prompts"] for row in rows))
    table = Table(title="decode tokens/s (seconds to the first token)", title_justify="left")
    table.add_column("", no_wrap=True)
    for kind in kinds:
        table.add_column(kind, justify="right")
    for name in comparison.runs:
        own = [row for row in rows if row["line"] == name]
        cells = [f"{row['decode_tokens_per_second']:.1f} ({row['first_token_seconds']:.2f})" for row in own]
        table.add_row(name, *cells)
    for name in missing:
        table.add_row(name, NOT_INSTALLED)
    return table


def claims_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="ratios of decode tokens/s", title_justify="left")
    for heading in ("", "prompts", "measured", "wanted", ""):
        table.add_column(heading)
    for row in rows:
        met = "yes" if row["ratio"] >= row["wanted"] else "no"
        table.add_row(row["claim"], row["prompts"], f"{row['ratio']:.2f}x", f"{row['wanted']:.2f}x", met)
    return table


def chosen_prompts(path: Path | None, categories: Sequence[str], count: int) -> list[NamedPrompt]:
    """``count`` prompts of each category; of all prompts, if none is named.

    Raises:
        InvalidOption: there is no prompt of such a category.
    """
    found = choose_prompts(path, None)
    if not categories:
        return choose_prompts(path, count)
    for category in categories:
        if category not in {prompt.category for prompt in found}:
            raise InvalidOption(
                where="the command line", name="--categories", value=category, reason="no prompt is of that category"
            )
    return [
        prompt for category in categories for prompt in [item for item in found if item.category == category][:count]
    ]


def run(
    model: PreTrainedModel,
    texts: Sequence[NamedPrompt],
    ids: Sequence[torch.Tensor],
    new_tokens: int,
    *,
    tiers: Sequence[int],
    form: WeightForm,
    rounded_only: bool,
    skip_compile: bool,
    gguf: Path | None,
    python: str | None,
) -> tuple[Comparison, dict[str, str], str]:
    """Returns the comparison, which peers there were, and how speccompile explains itself."""
    options: dict[str, Any] = {"tiers": tiers, "prefix_reuse": False}
    options["max_len"] = max(item.shape[1] for item in ids) + new_tokens
    with contextlib.ExitStack() as stack:
        variants: list[Variant] = []
        if not rounded_only:
            spec = stack.enter_context(wrap(model, "ngram", **options))
            variants += make_variants(model, spec, ["lookup"] if skip_compile else ["static", "lookup"])
            variants += own_variants(spec, PLAIN, NGRAM)
        rounded = stack.enter_context(wrap(model, "ngram", weights=form, **options))
        variants += own_variants(rounded, ROUNDED[form], DRAFTED[form])
        draft_lens = (0, max(item for item in tiers if isinstance(item, int)))
        others = stack.enter_context(
            peers(python or sys.executable, torch.get_num_threads(), form, draft_lens, options["max_len"], gguf)
        )
        variants += [peer.variant(eos_of(model)) for peer in others if peer.installed]
        with count_runs("Measuring, prompt by prompt", len(variants) * (len(ids) + 1)) as after_run:
            comparison = compare(model, variants, texts, ids, new_tokens, after_run)
        versions = {peer.name: peer.installed or NOT_INSTALLED for peer in others}
        return comparison, versions, rounded.explain()


def main(
    model: Annotated[str, typer.Option(help="smollm2, or a GGUF file, which the peers then read as it is.")] = SMOLLM2,
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's JSON lines, also .gz.")] = None,
    categories: Annotated[str, typer.Option(help="Which of its categories; empty: all, in turns.")] = "",
    count: Annotated[int, typer.Option(min=1, help="So many prompts a category, or in all.")] = 8,
    new_tokens: Annotated[int, typer.Option(min=2, help="Most new tokens a prompt.")] = 96,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7",
    weights: Annotated[str, typer.Option(help="Of the lines over rounded weights: int8 or int4.")] = "int8",
    peers_python: Annotated[str | None, typer.Option(help="A Python that has the peers, if not this one.")] = None,
    rounded_only: Annotated[bool, typer.Option(help="Leave out transformers and the model's own weights.")] = False,
    skip_compile: Annotated[bool, typer.Option(help="Leave out torch.compile of transformers' forward.")] = False,
    quick: Annotated[bool, typer.Option(help="A minute, to see that it runs: figures mean little.")] = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Decode the same prompts with everything there is."""
    if quick:
        count, new_tokens, tiers, skip_compile = 1, 8, "0,3", True
    with session():
        form = read_weights("the command line", "--weights", weights)
        if form not in PEERS:
            reason = f"choose from {', '.join(PEERS)}"
            raise InvalidOption(where="the command line", name="--weights", value=weights, reason=reason)
        wanted = [name.strip() for name in categories.split(",") if name.strip()]
        texts = chosen_prompts(prompts, wanted, count)
        draft_lens = parse_tiers(tiers)
        target, tokenizer = load(model, dtype=torch.float32)
        comparison, versions, explanation = run(
            target,
            texts,
            [encode(tokenizer, prompt.text, prompt.chat) for prompt in texts],
            new_tokens,
            tiers=draft_lens,
            form=form,
            rounded_only=rounded_only,
            skip_compile=skip_compile,
            gguf=None if model == SMOLLM2 else Path(model),
            python=peers_python,
        )
        missing = [name for name, version in versions.items() if version == NOT_INSTALLED]
        claims = claim_rows(comparison)
        console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
        for table in (runs_table(comparison), rates_table(comparison, missing), claims_table(claims)):
            console.print(table)
        for name, version in versions.items():
            typer.echo(f"{name}: {version}")
        if json_file is not None:
            settings = {
                "model": model,
                "tiers": draft_lens,
                "new_tokens": new_tokens,
                "weights": form,
                "prompts": name_of(prompts),
                "count": len(texts),
            }
            report = {"machine": describe(), "peers": versions, "settings": settings, "explain": explanation}
            report |= {"claims": claims, "rates": rates(comparison)}
            json_file.write_text(json.dumps(report | comparison.as_json(), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

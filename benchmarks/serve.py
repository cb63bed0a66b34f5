"""Requests that arrive at random moments, served by the engine and by transformers.

``python -m benchmarks.serve --prompts FILE --count 24 --rate 1.5 --slots 4``; see README.md beside this file.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedModel

from benchmarks.machine import describe
from benchmarks.prompts import name_of
from benchmarks.servers import BATCH_TOKENS, serve_batching, serve_engine, serve_in_turn
from benchmarks.serving import Service, arrivals, fitting_prompts, percentile
from speccompile import modes, wrap
from speccompile.cli.models import load
from speccompile.cli.prompts import NamedPrompt
from speccompile.cli.session import parse_options, parse_tiers, session
from speccompile.runtime.check import Difference, first_difference
from speccompile.runtime.policy_controller import parse_policy
from speccompile.utils.progress import task

IN_TURN = "transformers generate, one by one"
BATCHING = "transformers continuous batching"
PIPED_WIDTH = 170


def texts_that_differ(
    model: PreTrainedModel, prompts: Sequence[list[int]], reference: Service, service: Service
) -> list[Difference]:
    """Where its texts part from the reference's, and the logit changes that explain it."""
    pairs = zip(prompts, reference.requests, service.requests, strict=True)
    found = [
        first_difference(model, index, ids, expected.tokens, got.tokens)
        for index, (ids, expected, got) in enumerate(pairs)
    ]
    return [difference for difference in found if difference is not None]


def figures(service: Service, different: Sequence[Difference]) -> dict[str, Any]:
    """One line of the table."""
    return {
        "variant": service.name,
        "tokens_per_second": service.tokens_per_second,
        "makespan_seconds": service.makespan,
        "first_token_p50": percentile(service.first_tokens, 50),
        "first_token_p99": percentile(service.first_tokens, 99),
        "token_p50": percentile(service.token_gaps, 50),
        "token_p99": percentile(service.token_gaps, 99),
        "slot_use": service.slot_use,
        "slots": service.slots,
        "acceptance_length": service.acceptance_length,
        "steps_by_tier": _shares(service.steps_by_tier),
        "steps_by_rows": _shares(service.steps_by_rows),
        "same_texts": len(service.requests) - len(different),
        "largest_logit_change": max((item.logit_change for item in different), default=0.0),
    }


def _shares(steps: Mapping[int, int]) -> dict[int, float]:
    return {key: count / sum(steps.values()) for key, count in steps.items()}


def table(rows: Sequence[Mapping[str, Any]], count: int) -> Table:
    table = Table(title=f"{count} requests", title_justify="left")
    table.add_column("", no_wrap=True)
    headings = ("tokens/s", "first token\np50 / p99", "time per token\np50 / p99", "slot use", "steps by K")
    for heading in (*headings, "steps by rows", "acceptance\nlength", "same texts"):
        table.add_column(heading, justify="right")
    for row in rows:
        same = "yes" if row["same_texts"] == count else f"{row['same_texts']} of {count}"
        table.add_row(
            row["variant"],
            f"{row['tokens_per_second']:.1f}",
            f"{row['first_token_p50']:.2f} / {row['first_token_p99']:.2f} s",
            f"{row['token_p50'] * 1e3:.0f} / {row['token_p99'] * 1e3:.0f} ms",
            f"{row['slot_use']:.0%} of {row['slots']}",
            _shares_text(row["steps_by_tier"]),
            _shares_text(row["steps_by_rows"]),
            f"{row['acceptance_length']:.2f}",
            same,
        )
    return table


def _shares_text(shares: Mapping[int, float]) -> str:
    return ", ".join(f"{key}: {share:.0%}" for key, share in shares.items()) or "-"


def report(
    prompts: Sequence[NamedPrompt], services: Sequence[Service], rows: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    requests = [
        {"variant": service.name, "prompt": prompt.name, "category": prompt.category, **asdict(served)}
        for service in services
        for prompt, served in zip(prompts, service.requests, strict=True)
    ]
    return {"machine": describe(), "variants": list(rows), "requests": requests}


def main(
    model: Annotated[str, typer.Option(help="smollm2, tiny, a local folder or a hub id.")] = "smollm2",
    prompts: Annotated[Path | None, typer.Option(help="Spec-Bench's or HumanEval's JSON lines, also .gz.")] = None,
    count: Annotated[int | None, typer.Option(min=1, help="So many prompts, spread over the categories.")] = None,
    rate: Annotated[float, typer.Option(min=0.001, help="Arrivals a second, in the mean (Poisson).")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the arrivals.")] = 0,
    new_tokens: Annotated[int, typer.Option(min=1, help="Most new tokens a request.")] = 64,
    slots: Annotated[int, typer.Option(min=1, help="Requests that run at a time.")] = 4,
    mode: Annotated[str, typer.Option(help=f"How to draft: {', '.join(modes.available())}.")] = "ngram",
    option: Annotated[list[str] | None, typer.Option(help="An option of the mode, name=value; may repeat.")] = None,
    tiers: Annotated[str, typer.Option(help="Draft lengths, 0 among them.")] = "0,1,3,7",
    policy: Annotated[
        list[str] | None, typer.Option(help="fixed:K or schedule:ROWS=K,...; may repeat. K=0 and the largest if none.")
    ] = None,
    budget: Annotated[
        list[int] | None,
        typer.Option(help=f"prefill_budget, 0 for the measured one; may repeat. 0 and {BATCH_TOKENS} if none."),
    ] = None,
    backend: Annotated[str, typer.Option(help="auto, eager or inductor.")] = "auto",
    max_len: Annotated[int, typer.Option(min=2, help="Most tokens of a text; longer prompts are left out.")] = 2048,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures there.")] = None,
) -> None:
    """Serve the same arrivals in several ways."""
    with session():
        draft_lens, options = parse_tiers(tiers), parse_options(option or [])
        modes.create(mode, options)
        policies = policy or [f"fixed:{draft_len}" for draft_len in dict.fromkeys((0, max(draft_lens)))]
        budgets = [tokens or None for tokens in budget or (0, BATCH_TOKENS)]
        for text in policies:
            parse_policy(text, draft_lens)
        target, tokenizer = load(model)
        names, ids = zip(*fitting_prompts(tokenizer, prompts, count, max_len - new_tokens), strict=True)
        times = arrivals(rate, len(ids), seed)
        services = []
        with task(f"serve {len(ids)} requests by {IN_TURN}"):
            services.append(serve_in_turn(IN_TURN, target, ids, times, new_tokens))
        with task(f"serve {len(ids)} requests by {BATCHING}"):
            services.append(serve_batching(BATCHING, target, ids, times, new_tokens, slots))
        for text, limit in itertools.product(policies, budgets):
            name = text if limit is None else f"{text}, prefill_budget={limit}"
            # Its own arena, so that no policy finds the KV of another one's requests.
            with (
                wrap(
                    target,
                    mode,
                    tiers=draft_lens,
                    max_batch=slots,
                    max_len=max_len,
                    backend=backend,
                    policy=text,
                    max_waiting=len(ids),
                    prefill_budget=limit,
                    **options,
                ) as spec,
                task(f"serve {len(ids)} requests by {name}"),
            ):
                services.append(serve_engine(f"speccompile {name}", spec, ids, times, new_tokens))
        differences = [texts_that_differ(target, ids, services[0], service) for service in services]
        rows = [figures(service, found) for service, found in zip(services, differences, strict=True)]
        # In a file or a pipe there is no width to keep to, and rich would cut names off at 80.
        Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table(rows, len(ids)))
        for service, found in zip(services, differences, strict=True):
            for difference in found:
                typer.echo(f"{service.name}, {difference}")
        if json_file is not None:
            settings = {"model": model, "prompts": name_of(prompts), "count": len(ids), "rate": rate}
            settings |= {"seed": seed, "new_tokens": new_tokens, "slots": slots, "mode": mode, "options": options}
            settings |= {"tiers": draft_lens, "policies": policies, "budgets": budgets, "max_len": max_len}
            json_file.write_text(json.dumps({"settings": settings} | report(names, services, rows), indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)

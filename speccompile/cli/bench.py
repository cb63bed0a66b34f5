"""``speccompile bench`` and ``bench-report``: compare drafters over the same prompts."""

from __future__ import annotations

import json as json_module
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from speccompile import wrap
from speccompile.bench.answers import tier_name
from speccompile.bench.contenders import Contender, Transformers, Wrapped
from speccompile.bench.dialogue import longest_sequence
from speccompile.bench.machine import describe_machine
from speccompile.bench.method_names import PLAIN, TRANSFORMERS
from speccompile.bench.methods import Method, resolve_methods
from speccompile.bench.page import bench_page
from speccompile.bench.prompt_files import BenchPrompt, read_prompt_file, spread
from speccompile.bench.results import BenchRun, ResultFile, Results, read_results
from speccompile.bench.runner import BenchPlan, run_bench
from speccompile.bench.summary import BenchSummary, summarize
from speccompile.bench.tables import tables_of, write_csv
from speccompile.cli.bench_settings import BenchSettings
from speccompile.cli.models import max_len_of
from speccompile.cli.progress import count_runs
from speccompile.cli.prompts import BUILT_IN
from speccompile.cli.ranks import loaded
from speccompile.cli.session import session
from speccompile.compiler.options import WrapOptions
from speccompile.errors import InvalidOption
from speccompile.policies import Fixed, parse_policy
from speccompile.policies.base import AnyPolicy
from speccompile.utils.tensor_parallel import started_processes

#: Width of a table that is not shown in a terminal.
_PIPED_WIDTH = 160
_INTERRUPTED = 130


@dataclass(frozen=True)
class Line:
    """A line of the table: a method under a policy; without a method it is K=0."""

    name: str
    method: Method | None
    policy: AnyPolicy
    tiers: tuple[int, ...]

    @property
    def facts(self) -> dict[str, Any]:
        """The line as the file of the results states it. Paths are given by their last part, which is the same on all
        machines."""
        if self.method is None:
            return {"mode": "none"}
        options = {name: _shown(value) for name, value in self.method.options.items()}
        tiers = [tier_name(tier) for tier in self.tiers]
        return {"mode": self.method.mode, "options": options, "policy": str(self.policy), "tiers": tiers}


def run(
    model: str,
    options: WrapOptions,
    device: str | None,
    settings: BenchSettings,
    output: Path,
    *,
    html: Path | None,
    csv: Path | None,
    json: Path | None,
) -> None:
    """See ``speccompile bench --help``.

    Args:
        options: options of all wraps.
    """
    with session():
        if started_processes() > 1:
            reason = "bench runs in one process; run it without torchrun"
            raise InvalidOption(where="the command line", name="processes", value=started_processes(), reason=reason)
        # A command that is installed does not search the current folder, as `python -m` does.
        sys.path.insert(0, os.getcwd())
        lines = _lines(resolve_methods(settings.methods, settings.mode_options), options, settings.policies)
        prompts = _prompts(settings)
        with loaded(model, device, options.backend, stored=settings.stored) as (target, tokenizer, weights):
            results = _measure(target, tokenizer, weights, lines, prompts, options, settings, model, output)
        _show(summarize(results), html=html, csv=csv, json=json)
        typer.echo(f"The results are in {output}")


def report(files: Sequence[Path], *, html: Path | None, csv: Path | None, json: Path | None) -> None:
    """See ``speccompile bench-report --help``."""
    with session():
        _show(summarize(read_results(files)), html=html, csv=csv, json=json)


def _lines(methods: Sequence[Method], options: WrapOptions, policies: Sequence[str]) -> list[Line]:
    tiers = options.draft_lens
    lines = [Line(PLAIN, None, Fixed(0), (0,))]
    for method in methods:
        if policies:
            lines += [Line(f"{method.name} {text}", method, parse_policy(text, tiers), tiers) for text in policies]
        else:
            lines += [Line(f"{method.name} {_tier(tier)}", method, Fixed(tier), tiers) for tier in tiers if tier]
    return lines


def _tier(tier: int) -> str:
    name = tier_name(tier)
    return f"K={name}" if name.isdecimal() else name


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return Path(value).resolve().name if Path(value).exists() else value
    if isinstance(value, bool | int | float | tuple | list | dict | None):
        return repr(value)
    return str(getattr(value, "__qualname__", type(value).__name__))


def _prompts(settings: BenchSettings) -> list[BenchPrompt]:
    """The chosen prompts, with at most as many turns as requested.

    Raises:
        InvalidOption: two prompts have the same name.
    """
    if settings.prompts:
        chosen = [prompt for path in settings.prompts for prompt in read_prompt_file(path)]
    else:
        chosen = [BenchPrompt(each.name, each.category, (each.text,), each.chat) for each in BUILT_IN]
    names = [prompt.name for prompt in chosen]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        reason = f"two prompts have the name {twice!r}; give each file once, and each prompt its own id"
        raise InvalidOption(
            where="the command line", name="--prompts", value=list(map(str, settings.prompts)), reason=reason
        )
    chosen = chosen if settings.count is None else spread(chosen, settings.count)
    return [replace(prompt, turns=prompt.turns[: settings.turns]) for prompt in chosen]


def _measure(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    weights: Mapping[str, Any],
    lines: Sequence[Line],
    prompts: Sequence[BenchPrompt],
    options: WrapOptions,
    settings: BenchSettings,
    model: str,
    output: Path,
) -> Results:
    prompts, max_len = _fitting(target, tokenizer, prompts, options, settings)
    machine = describe_machine(target.device)
    facts = {line.name: line.facts for line in lines}
    if settings.transformers:
        facts[TRANSFORMERS] = {"dtype": str(target.dtype).removeprefix("torch.")}
    plan = BenchPlan(prompts, settings.rounds, settings.decoding, settings.seed, settings.chat)
    file = ResultFile(output, BenchRun(settings.shared(model, options), facts, machine))
    done = file.results.done(str(machine["name"]))
    # A line that has all of its answers is neither built nor warmed up.
    missing = {name: len(plan.keys(name) - done) for name in facts}
    total = sum(missing.values())
    if done and total:
        typer.echo(f"{output} has {len(done)} answers; {total} are missing", err=True)
    with ExitStack() as opened:
        opened.callback(file.close)
        needed = [line for line in lines if missing[line.name]]
        options = replace(options, max_len=max_len)
        contenders: list[Contender] = _wrapped(target, weights, needed, options, settings, opened)
        if missing.get(TRANSFORMERS):
            contenders.append(Transformers(target))
        try:
            with count_runs("Decoding, prompt by prompt", total) as after_run:
                if contenders:
                    run_bench(contenders, plan, tokenizer, file, str(machine["name"]), after_run)
        except KeyboardInterrupt:
            typer.echo(f"stopped; the same command continues from {output}", err=True)
            raise typer.Exit(_INTERRUPTED) from None
    return file.results


def _fitting(
    target: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[BenchPrompt],
    options: WrapOptions,
    settings: BenchSettings,
) -> tuple[list[BenchPrompt], int]:
    """The prompts whose conversations fit, and ``max_len``.

    Raises:
        InvalidOption: none fits.
    """
    needed = {
        prompt.name: longest_sequence(tokenizer, prompt, settings.max_new_tokens, settings.chat) for prompt in prompts
    }
    positions = getattr(target.config.get_text_config(), "max_position_embeddings", None)
    most = min(limit for limit in (options.max_len, positions, max(needed.values())) if limit is not None)
    kept = [prompt for prompt in prompts if needed[prompt.name] <= most]
    if not kept:
        reason = f"no prompt fits with its answers; the shortest needs {min(needed.values())} tokens"
        raise InvalidOption(where="the command line", name="--max-len", value=most, reason=reason)
    if len(kept) < len(prompts):
        typer.echo(f"left out {len(prompts) - len(kept)} prompts that need more than {most} tokens", err=True)
    return kept, options.max_len or max_len_of(max(needed[prompt.name] for prompt in kept), positions)


def _wrapped(
    target: PreTrainedModel,
    weights: Mapping[str, Any],
    lines: Sequence[Line],
    options: WrapOptions,
    settings: BenchSettings,
    opened: ExitStack,
) -> list[Contender]:
    """The lines, each method wrapped once."""
    specs: dict[str, Any] = {}
    contenders: list[Contender] = []
    for line in lines:
        method = line.method
        name = PLAIN if method is None else method.name
        if name not in specs:
            own = replace(options, tiers=line.tiers, sampling=bool(settings.temperature))
            if method is None:
                # Without drafts, a rule for them has no effect.
                own = replace(own, acceptance=None)
            else:
                own = replace(own, mode=method.mode, mode_options=method.options)
            specs[name] = opened.enter_context(wrap(target, **(own.arguments() | dict(weights))))
        contenders.append(Wrapped(line.name, specs[name], line.policy))
    return contenders


def _show(summary: BenchSummary, *, html: Path | None, csv: Path | None, json: Path | None) -> None:
    console = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    for table in tables_of(summary):
        console.print(table)
        console.print()
    if html is not None:
        html.write_text(bench_page(summary), encoding="utf-8")
        typer.echo(f"The page is {html}")
    if csv is not None:
        write_csv(csv, summary)
    if json is not None:
        json.write_text(json_module.dumps(summary.as_json(), indent=1, allow_nan=False) + "\n", encoding="utf-8")

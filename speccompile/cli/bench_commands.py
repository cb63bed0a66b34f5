"""Commands that compare drafters, with their options. Imports as in ``commands.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from speccompile.bench.method_names import read_methods
from speccompile.cli.arguments import (
    KV,
    Backend,
    CalibrationFile,
    Device,
    MaxLen,
    Model,
    Weights,
    check_mode,
    check_wrap,
    form_of,
    modes,
    option_of,
)
from speccompile.cli.files import check_output_file
from speccompile.cli.session import one_line_errors, parse_options, parse_tiers
from speccompile.compiler.options import WrapOptions
from speccompile.errors import InvalidOption
from speccompile.policies import parse_policy
from speccompile.runtime.request_options import GenerateOptions
from speccompile.utils.model_names import check_tokenizer

bench = typer.Typer()

_METHOD_HELP = (
    "A drafter to measure; may repeat. A mode, several joined by +, with the folder of a head or draft model after =, "
    f"or your own drafter by its import path, my.module:MyDrafter. Modes: {', '.join(modes())}."
)
_PROMPTS_HELP = (
    "Prompts in the layout of SPEED-Bench, Spec-Bench, MT-Bench, HumanEval, GSM8K or ShareGPT (JSON lines or a JSON "
    "list, also .gz), or a text file with a prompt in each line; may repeat. Built-in ones if left out."
)
_POLICY_HELP = "A policy under which each method decodes; may repeat. Each tier by itself if left out."
Html = Annotated[Path | None, typer.Option(dir_okay=False, help="Write a page to this file, which loads nothing.")]
Csv = Annotated[Path | None, typer.Option("--csv", dir_okay=False, help="Write the figures to this file, as CSV.")]
Json = Annotated[Path | None, typer.Option("--json", dir_okay=False, help="Write all figures to this file, as JSON.")]


@bench.command("bench")
def run_bench(
    model: Model,
    method: Annotated[list[str] | None, typer.Option(help=_METHOD_HELP)] = None,
    prompts: Annotated[list[Path] | None, typer.Option(exists=True, dir_okay=False, help=_PROMPTS_HELP)] = None,
    output: Annotated[
        Path,
        typer.Option(dir_okay=False, help="The file of the results, JSON lines. A run that it began is continued."),
    ] = Path("bench.jsonl"),
    html: Html = None,
    csv: Csv = None,
    json: Json = None,
    tiers: Annotated[
        str,
        typer.Option(help="Draft lengths of the methods, 0 among them, and trees as tree:NODES:DEPTH:BRANCHES."),
    ] = "0,3",
    policy: Annotated[list[str] | None, typer.Option(help=_POLICY_HELP)] = None,
    acceptance: Annotated[str | None, option_of(WrapOptions, "acceptance", more="exact if left out.")] = None,
    count: Annotated[
        int | None, typer.Option(min=1, help="Use this number of prompts, spread over the categories.")
    ] = None,
    turns: Annotated[
        int | None, typer.Option(min=1, help="Most turns of a conversation; all of its turns if left out.")
    ] = None,
    rounds: Annotated[
        int, typer.Option(min=1, help="Rounds over all prompts; the median run of each prompt counts.")
    ] = 1,
    max_new_tokens: Annotated[int, option_of(GenerateOptions, "max_new_tokens")] = 256,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy; above it tokens are drawn.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(min=0, max=1, help="Keep the likeliest tokens of this mass.")] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep this number of likeliest tokens.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of what is drawn.")] = 0,
    transformers: Annotated[
        bool, typer.Option("--transformers/--no-transformers", help="Whether transformers' generate is a line, too.")
    ] = True,
    chat: Annotated[
        bool | None,
        typer.Option("--chat/--no-chat", help="Use the chat template; by default as the layout of the prompts has it."),
    ] = None,
    weights: Weights = "same",
    calibration: CalibrationFile = None,
    kv: KV = "same",
    backend: Backend = WrapOptions.backend,
    device: Device = None,
    max_len: MaxLen = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of wrap, or of the methods that have it, name=value; may repeat."),
    ] = None,
) -> None:
    """Compare drafters over the same prompts: speed over K=0, acceptance, the cost of a step, and whether texts differ.

    All lines answer a prompt before the next one, K=0 and transformers' generate among them. Each answer is appended
    to --output, and the same command continues a run that was stopped.
    """
    with one_line_errors():
        methods = read_methods(method or ["ngram"])
        draft_lens = parse_tiers(tiers)
        if draft_lens == (0,):
            reason = "no tier drafts; add a draft length, such as 0,3"
            raise InvalidOption(where="the command line", name="--tiers", value=tiers, reason=reason)
        for each in methods:
            for name in each.registered:
                check_mode(name)
        for text in policy or ():
            parse_policy(text, draft_lens)
        if not temperature and (top_p is not None or top_k is not None):
            name, value = ("--top-p", top_p) if top_p is not None else ("--top-k", top_k)
            reason = f"it draws tokens, and temperature 0 does not; add --temperature, or leave out {name}"
            raise InvalidOption(where="the command line", name=name, value=value, reason=reason)
        given = parse_options(option or [])
        of_wrap = {name: value for name, value in given.items() if name in WrapOptions.names()}
        options = WrapOptions.of(
            {
                "mode": "none",
                "tiers": draft_lens,
                "acceptance": acceptance,
                "weights": form_of(weights),
                "calibration": calibration,
                "kv": kv,
                "backend": backend,
                "max_len": max_len,
                "prefix_reuse": False,
            }
            | of_wrap
        )
        check_wrap(model, options, device)
        check_tokenizer(model)
        outputs = {"--output": output, "--html": html, "--csv": csv, "--json": json}
        for name, path in outputs.items():
            check_output_file(name, path)
    from speccompile.cli import bench
    from speccompile.cli.bench_settings import BenchSettings

    bench.run(
        model,
        options,
        device,
        BenchSettings(
            methods=methods,
            policies=tuple(policy or ()),
            mode_options={name: value for name, value in given.items() if name not in of_wrap},
            wrap_options=of_wrap,
            stored=weights == "stored",
            prompts=tuple(prompts or ()),
            count=count,
            turns=turns,
            rounds=rounds,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            transformers=transformers,
            chat=chat,
        ),
        output,
        html=html,
        csv=csv,
        json=json,
    )


@bench.command("bench-report")
def report(
    files: Annotated[list[Path], typer.Argument(exists=True, dir_okay=False, help="Files that bench has written.")],
    html: Html = None,
    csv: Csv = None,
    json: Json = None,
) -> None:
    """Show the results of bench again: of one file, or of several, from one machine or from several, as one table."""
    with one_line_errors():
        for name, path in {"--html": html, "--csv": csv, "--json": json}.items():
            check_output_file(name, path)
    from speccompile.cli import bench

    bench.report(files, html=html, csv=csv, json=json)


@bench.command("bench-replay")
def replay(
    trace: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="A file of spec.record_trace(path, tokens=True).")
    ],
    method: Annotated[
        list[str] | None,
        typer.Option(help="A drafter that only reads tokens, named as for bench; may repeat. ngram if left out."),
    ] = None,
    draft_len: Annotated[list[int] | None, typer.Option(min=1, help="K; may repeat. 3 if left out.")] = None,
    costs: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="Costs of steps, of this or another machine: JSON of a CostTable, or a trace. Those of TRACE if left "
            "out.",
        ),
    ] = None,
    json: Json = None,
    option: Annotated[
        list[str] | None,
        typer.Option("--option", help="An option of the methods that have it, name=value; may repeat."),
    ] = None,
) -> None:
    """Replay drafters over recorded tokens, without the model: exactly the steps that they would have run."""
    with one_line_errors():
        methods = read_methods(method or ["ngram"])
        for each in methods:
            for name in each.registered:
                check_mode(name)
        check_output_file("--json", json)
        options = parse_options(option or [])
    from speccompile.cli import bench_replay

    bench_replay.run(trace, methods, options, draft_len or [3], costs, json)

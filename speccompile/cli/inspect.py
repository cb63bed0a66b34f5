"""``speccompile inspect``: show the compiled steps of a model in the terminal, as one HTML file, or as data."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer
from transformers import PreTrainedModel

from speccompile import modes, wrap
from speccompile.cli.devices import choose_shared_device
from speccompile.cli.models import encode, load, load_model, load_stored
from speccompile.cli.prompts import read_prompts
from speccompile.cli.ranks import follow, leave_ranks
from speccompile.cli.session import session
from speccompile.compiler.frontend import BuiltStages, build_stages
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.plan import Plan, make_plan
from speccompile.errors import InvalidOption
from speccompile.graph.keys import Kind
from speccompile.modes.auto import first_that_works
from speccompile.report.collect import collect
from speccompile.report.data import Report
from speccompile.report.render.page import page
from speccompile.report.render.terminal import show
from speccompile.report.source import of_stages
from speccompile.report.traces import trace_report
from speccompile.runtime.trace_reader import read_trace
from speccompile.utils.tensor_parallel import started_processes


def run(
    model: str,
    options: WrapOptions,
    device: str | None,
    *,
    draft_len: int,
    stage: str | None,
    build: bool,
    measure: bool | None,
    html: Path | None,
    as_json: bool,
    prompts: Path | None,
    new_tokens: int,
    trace: Path | None,
    stored: bool,
) -> None:
    """See ``speccompile inspect --help``.

    Args:
        options: with ``sampling``, the executables that sample are shown.
        draft_len: tier to show in the terminal.
        stage: stage to print instead.
        build: whether to lower the result of the passes; a sharded model is always built.
        measure: whether to time the steps; None times them unless the model is sharded.
        stored: use the integers of a quantised checkpoint.
    """
    with session():
        modes.create(options.mode, dict(options.mode_options))
        ranks = started_processes()
        if ranks > 1 and not build:
            reason = "the processes of a sharded model must build it together; leave it out"
            raise InvalidOption(where="the command line", name="--no-build", value=True, reason=reason)
        if stored and (stage is not None or not build):
            flag = "--no-build" if stage is None else "--stage"
            reason = f"the integers of a checkpoint are packed by a build; leave out {flag}, or --weights"
            raise InvalidOption(where="the command line", name="--weights", value="stored", reason=reason)
        chosen_device = choose_shared_device(device, options.backend, stored=stored)
        if stage is not None and ranks == 1:
            built, _ = _stages(load_model(model, chosen_device), options)
            sys.stdout.write(built.tiers[draft_len, options.max_batch, _kind(options)].stages[stage].python)
            return
        ids: list[list[int]] = []
        chosen = None if prompts is None else read_prompts(prompts)
        weights: dict[str, Any] = {}
        if stored:
            target, tokenizer, weights["weights"] = load_stored(model, ranks=ranks)
        elif chosen is None:
            target = load_model(model, chosen_device, ranks=ranks)
        else:
            target, tokenizer = load(model, chosen_device, ranks=ranks)
        if chosen is not None:
            ids = [encode(tokenizer, prompt.text, prompt.chat)[0].tolist() for prompt in chosen]
        if build:
            with contextlib.ExitStack() as after:
                after.callback(leave_ranks)
                spec = after.enter_context(wrap(target, **(options.arguments() | weights)))
                if spec.rank != 0:
                    follow(spec)
                    return
                if stage is not None:
                    tier = spec.engine.tiers[draft_len, options.max_batch, _kind(options)]
                    sys.stdout.write(tier.stages[stage].python)
                    return
                report = spec.report(
                    html,
                    measure=ranks == 1 if measure is None else measure,
                    prompts=ids,
                    max_new_tokens=new_tokens,
                    trace=trace,
                    kind=_kind(options),
                )
        else:
            report = _not_lowered(target, options, trace)
            if html is not None:
                html.write_text(page(report), encoding="utf-8")
        if as_json:
            json.dump(report.as_json(), sys.stdout, allow_nan=False)
        elif html is None:
            show(report, draft_len)
        else:
            typer.echo("\n".join([*report.verdict, f"The report is {html}"]))


def _kind(options: WrapOptions) -> Kind:
    return "sampled" if options.sampling else "greedy"


def _stages(model: PreTrainedModel, options: WrapOptions) -> tuple[BuiltStages, Plan]:
    plan = first_that_works(lambda failed: make_plan(model, options, passed_over=failed))
    # Settled kernels: the printed stage can run.
    config = replace(plan.config, kernels=plan.config.kernels.settled())
    return build_stages(model, plan.info, config, kind=_kind(options)), plan


def _not_lowered(model: PreTrainedModel, options: WrapOptions, trace: Path | None) -> Report:
    built, plan = _stages(model, options)
    recorded = None if trace is None else trace_report(read_trace(trace), trace.name)
    return collect(of_stages(plan.info, built, _kind(options)), trace=recorded)

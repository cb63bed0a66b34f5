"""``speccompile inspect``: stages, ops, tiers, buffers and bytes of a step, before and after it is built."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from rich.console import Console
from transformers import PreTrainedModel

from speccompile import modes, wrap
from speccompile.cli.models import load_model
from speccompile.cli.session import session
from speccompile.cli.tables import buffers_table, kernels_table, stages_table, tiers_table, weights_line
from speccompile.compiler.frontend import build_stages
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.plan import make_plan
from speccompile.graph.keys import Kind
from speccompile.graph.stage import Stages
from speccompile.graph.state import Layout
from speccompile.lowering.kernel_list import kernels_called
from speccompile.modes.auto import first_that_works


@dataclass(frozen=True)
class View:
    """What there is to look at.

    Args:
        tiers: by draft length and row count.
        drafters: likewise, what a split mode runs before each tier, by the number of drafts after it.
        backend: None where nothing was lowered. Then there is no ``code`` of compiled bodies either.
    """

    tiers: Mapping[tuple[int, int], Stages]
    drafters: Mapping[tuple[int, int], Mapping[int, Stages]]
    prefill: Mapping[int, Stages]
    layout: Layout
    drafter_state: frozenset[str]
    backend: str | None
    explanation: str = ""
    code: Mapping[str, str] = field(default_factory=dict)


def run(model: str, options: WrapOptions, *, draft_len: int, stage: str | None, build: bool) -> None:
    """See ``speccompile inspect --help``.

    Args:
        options: with ``sampling``, the executables that sample are shown.
        draft_len: the tier to show; ``stage``: the one to print instead.
        build: whether to lower what the passes return.
    """
    with session():
        modes.create(options.mode, dict(options.mode_options))
        target = load_model(model)
        view = _built(target, options) if build and stage is None else _captured(target, options)
        if stage is not None:
            sys.stdout.write(view.tiers[draft_len, options.max_batch][stage].python)
        else:
            _show(view, draft_len, options.max_batch)


def _kind(options: WrapOptions) -> Kind:
    return "sampled" if options.sampling else "greedy"


def _built(model: PreTrainedModel, options: WrapOptions) -> View:
    kind = _kind(options)
    with wrap(model, **options.arguments()) as spec:
        tiers_of_kind = {name[:2]: built for name, built in spec.engine.tiers.items() if name[2] == kind}
        drafters = {
            name: {segment.draft_len: segment.stages for segment in built.segments}
            for name, built in tiers_of_kind.items()
        }
        code = spec.backend.compiled_code(spec.stages["outline"].graph)
        for segments in drafters.values():
            for drafter in segments.values():
                code |= spec.backend.compiled_code(drafter.last.graph)
        return View(
            {name: built.stages for name, built in tiers_of_kind.items()},
            drafters,
            {name[0]: built.stages for name, built in spec.engine.prefill_tiers.items() if name[1] == kind},
            spec.arena.layout,
            frozenset(item.name for item in spec.mode.state()),
            spec.backend.name,
            spec.explain(),
            code,
        )


def _captured(model: PreTrainedModel, options: WrapOptions) -> View:
    kind = _kind(options)
    plan = first_that_works(lambda failed: make_plan(model, options, passed_over=failed))
    # What is printed can be run.
    config = replace(plan.config, kernels=plan.config.kernels.settled())
    stages = build_stages(model, plan.info, config, kind=kind)
    drafter = frozenset(item.name for item in plan.config.mode.state())
    steps = {name[:2]: its for name, its in stages.tiers.items() if name[2] == kind}
    tiers_of_kind = {name: its.stages for name, its in steps.items()}
    own = {name: its.drafter.stages for name, its in sorted(steps.items()) if its.drafter is not None}
    drafters = {
        (draft_len, rows): {
            drafted: segment
            for (drafted, other), segment in own.items()
            if other == rows and (drafted == draft_len or (config.drafts_in_segments and drafted < draft_len))
        }
        for draft_len, rows in steps
    }
    prefill_of_kind = {name[0]: its.stages for name, its in stages.prefill.items() if name[1] == kind}
    return View(tiers_of_kind, drafters, prefill_of_kind, stages.arena.layout, drafter, None)


def _show(view: View, draft_len: int, rows: int) -> None:
    stages = view.tiers[draft_len, rows]
    graph = stages.last.graph
    drafters = view.drafters[draft_len, rows]
    calls = kernels_called(graph, graph.device.type, view.code, [drafter.last.graph for drafter in drafters.values()])
    console = Console()
    if view.explanation:
        console.print(view.explanation, markup=False, highlight=False, soft_wrap=True)
    tables = (
        *(stages_table(drafter, f"Stages of the drafter of tier K={drafted}") for drafted, drafter in drafters.items()),
        stages_table(stages, f"Stages of tier K={draft_len}"),
        kernels_table(calls, f"Kernels of tier K={draft_len}", view.backend),
        tiers_table(view.tiers, view.prefill, view.backend),
        buffers_table(view.layout, view.drafter_state),
    )
    for table in tables:
        console.print(table, "")
    console.print(weights_line(graph), highlight=False)

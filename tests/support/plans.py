"""Plans of wraps, and single steps of them, without a wrap."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import PreTrainedModel

from speccompile.compiler import frontend
from speccompile.compiler.options import WrapOptions
from speccompile.compiler.pipelines import step_pipeline
from speccompile.compiler.plan import Plan, make_plan
from speccompile.graph.keys import Kind
from speccompile.graph.step_graph import StepGraph
from speccompile.modes.auto import first_that_works


def planned(model: PreTrainedModel, mode: str, **arguments: Any) -> Plan:
    """What ``wrap`` with these arguments would build."""
    return make_plan(model, WrapOptions.of({"mode": mode, **arguments}))


def step_graph(model: PreTrainedModel, mode: str, draft_len: int, kind: Kind, **arguments: Any) -> StepGraph:
    """One decode step of ``max_batch`` rows, as ``wrap`` with these arguments would build it. No other step is built,
    and none is compiled."""
    built = built_stages(model, mode, **arguments)
    form = built.config.form(draft_len, built.config.max_batch, kind)
    graph, _ = step_pipeline(built.config, form).run(built.model.last.graph)
    return graph


def built_stages(model: PreTrainedModel, mode: str, **arguments: Any) -> frontend.BuiltStages:
    """The captured model of a wrap with these arguments, and none of its steps."""
    plan = planned(model, mode, **arguments)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frontend, "steps_of_kind", lambda *_: ({}, {}))
        return frontend.build_stages(model, plan.info, plan.config)


def auto_plan(model: PreTrainedModel, **arguments: Any) -> Plan:
    """What a wrap with mode ``auto`` builds, after what it passes over before anything is captured."""
    options = WrapOptions.of({"mode": "auto", **arguments})
    return first_that_works(lambda failed: make_plan(model, options, passed_over=failed))

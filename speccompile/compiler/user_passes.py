"""Checks that the user's own passes have anchors among the passes of this package, and unique names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from speccompile.compiler.config import BuildConfig
from speccompile.compiler.layout import prefill_widths, state_specs
from speccompile.compiler.pipelines import model_pipeline, step_pipelines
from speccompile.errors import InvalidOption
from speccompile.graph.stage import CAPTURE
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.base import Pass
from speccompile.passes.pipeline import Pipeline
from speccompile.passes.user_pass import state_specs_of


def check_anchors(config: BuildConfig, vocab_size: int) -> None:
    """Check that each of the user's passes has its anchor in a pipeline, and a unique name and state tensors.

    Raises:
        InvalidOption: a pass fails this check.
    """
    if not config.passes:
        return

    def refuse(item: Pass, reason: str) -> InvalidOption:
        return InvalidOption(where="wrap", name="passes", value=item, reason=reason)

    without = replace(config, passes=())
    ours = list(dict.fromkeys(item.name for pipeline in _pipelines(without) for item in pipeline.passes))
    own = {item.name for item in config.passes}
    of_model, *of_steps = [{item.name for item in pipeline.passes} for pipeline in _pipelines(config)]
    run = of_model.union(*of_steps)
    taken = {spec.name for spec in state_specs(without, vocab_size)}
    for item in config.passes:
        if item.name in (CAPTURE, *ours):
            raise refuse(item, f"a pass or stage of this package has the name {item.name!r}; rename it")
        if item.name in of_model and item.name in set().union(*of_steps):
            reason = f"pass {item.name!r} has anchors both among the passes of the model and among those of a step"
            raise refuse(item, f"{reason}: give each its own pass")
        if item.name not in run:
            word = "after" if item.anchors_after else "before"
            anchors = item.anchors_after or item.anchors_before
            reason = f"pass {item.name!r} runs {word} {' or '.join(map(repr, anchors))}, which "
            if own.intersection(anchors):
                raise refuse(item, f"{reason}does not run: one of them must have a pass of this package as its anchor")
            reason += "is not among the passes"
            raise refuse(item, f"{reason}; use one of {', '.join(ours)}")
        for spec in state_specs_of(item):
            if spec.name in taken:
                raise refuse(item, f"a state tensor of pass {item.name!r} has the name {spec.name!r} of another")
            taken.add(spec.name)


def _pipelines(config: BuildConfig) -> Iterator[Pipeline]:
    """A pipeline of each form that this wrap may build."""
    yield model_pipeline(config, WeightPacks(config.weights))
    yield from step_pipelines(config, prefill_widths(config.max_len)[0])

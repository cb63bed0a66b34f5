"""Finished steps as printed code. A stored step is read instead of built.

The result of passes depends on the outlined model, on the passes' fields and on their code. The name of a stored step
is a digest of all of these, so the stored step is the one that the passes would build. Its stages are built at the
first access.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import torch
import transformers

from speccompile.errors import PassError
from speccompile.graph.finished import FinishedStep
from speccompile.graph.port import Port
from speccompile.graph.printing import to_python
from speccompile.graph.stage import Stages
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Pass
from speccompile.passes.pipeline import Pipeline
from speccompile.sampling.pipeline import all_processors
from speccompile.sampling.process_scores import state_of
from speccompile.utils.build_lock import one_build
from speccompile.utils.code_key import own_code_key
from speccompile.utils.sources import sources
from speccompile.utils.stable_key import NoStableKey, stable_key
from speccompile.utils.storage import Storage, digest


class StepMaker:
    """Builds finished steps from the outlined model, or reads stored ones.

    Args:
        model: stages of the model, the last one outlined.
    """

    def __init__(self, model: Stages, storage: Storage) -> None:
        self._model, self._storage = model, storage
        self._outlined = model.last.graph
        self._keys: list[tuple[Pass, Any]] = []

    def finish(self, pipeline: Pipeline) -> FinishedStep:
        """Return the last stage of ``pipeline`` as source and ports: the stored step, or else the result of a run."""
        name = self._name(pipeline)
        stored = None if name is None else self._storage.read(name)
        if name is not None and stored is not None:
            return self._read(pipeline, name, json.loads(stored))
        if name is None:
            # Its passes may read values that change before the first access to the stages.
            stages = self._run(pipeline)
            graph = stages.last.graph
            source = to_python(graph, pipeline.tier)
        else:
            graph = pipeline.finish(self._outlined)
            source = to_python(graph, pipeline.tier)
            stages = self._deferred_stages(pipeline, name, source)
        ports = tuple(graph.ports[node.name] for node in graph.placeholders)
        if not all(port.role == "state" or port.name in self._known for port in ports):
            # A stored step has names of ports without values, and here a pass of the user has added a constant.
            name = None
        return FinishedStep(source, ports, graph.sizes["B"], graph.sizes["T"], stages, name)

    def store(self, steps: Iterable[FinishedStep]) -> None:
        """Store those that are not stored yet."""
        for step in steps:
            if step.name is not None and self._storage.read(step.name) is None:
                self._storage.write(step.name, step.file())

    def _run(self, pipeline: Pipeline) -> Stages:
        _, stages = pipeline.run(self._outlined, self._model.last)
        return self._model.followed_by(stages)

    def _deferred_stages(self, pipeline: Pipeline, name: str, source: str) -> Stages:
        """The stages that lead to ``source``, built at the first access."""

        @one_build()
        def rerun() -> Stages:
            stages = self._run(pipeline)
            if to_python(stages.last.graph, pipeline.tier) != source:
                raise PassError(
                    f"the stored {pipeline.tier} differs from the result of its passes, though its key is the same: "
                    f"delete {name} in the cache folder and wrap again",
                    tier=pipeline.tier,
                    file=name,
                )
            return stages

        return Stages(rerun)

    def _read(self, pipeline: Pipeline, name: str, data: dict[str, Any]) -> FinishedStep:
        layout, device, known = self._outlined.layout, self._outlined.device, self._known
        ports = tuple(
            known[port] if port in known else Port.of_state(layout.tensors[port], device) for port in data["ports"]
        )
        stages = self._deferred_stages(pipeline, name, data["source"])
        return FinishedStep(data["source"], ports, data["rows"], data["width"], stages, name)

    def _name(self, pipeline: Pipeline) -> str | None:
        """The name of a step in the storage. None if a pass has no stable key: code from outside of this package, or
        values without a key."""
        if self._outlined.logits_processors:
            return None
        try:
            passes = [self._key_of_users(item) if item.is_users else stable_key(item) for item in pipeline.passes]
        except NoStableKey:
            return None
        parts = [self.model_key, json.dumps(passes), repr(sorted(pipeline.goals)), pipeline.tier]
        return f"steps/{digest(chr(10).join(parts))[:32]}.json"

    def _key_of_users(self, item: Pass) -> Any:
        """The key of a user's pass at the first call: the pass may later change values that the key covers."""
        known = next((key for other, key in self._keys if other is item), None)
        if known is None:
            known = own_code_key(item)
            self._keys.append((item, known))
        return known

    @functools.cached_property
    def _known(self) -> dict[str, Port]:
        """The ports of the outlined model and of the drafter."""
        drafter = self._outlined.drafter
        return {**({} if drafter is None else drafter.ports), **self._outlined.ports}

    @functools.cached_property
    def model_key(self) -> str:
        """Digest of the code, and of everything in the outlined model and the drafter that passes can read."""
        drafter = [] if self._outlined.drafter is None else _seen(self._outlined.drafter)
        processors = [(item.name, state_of(item)) for item in all_processors(self._outlined.layout.tensors)]
        versions = [sources(), torch.__version__, transformers.__version__]
        parts = [*versions, repr(processors), *_seen(self._outlined), *drafter]
        return digest("\n".join(parts))


def _seen(graph: StepGraph) -> list[str]:
    """Everything in an outlined model that passes can read, except the values of weights."""
    anchors = graph.anchors
    nodes = [anchors.tokens, anchors.positions, anchors.start, *anchors.layers, anchors.final_norm, anchors.lm_head]
    return [
        to_python(graph, "the outlined model"),
        repr([node.name for node in nodes]),
        repr({name: node.name for name, node in graph.values.items()}),
        repr([(node.name, node.meta.get("layer")) for node in graph.graph.nodes]),
        repr(sorted(graph.facts)),
        repr([sorted(graph.sizes.items()), graph.route, graph.device, graph.layout]),
        repr([(port.name, port.path, port.own, port.parts) for port in graph.ports.values()]),
        repr([(body.name, body.dims, body.dtypes, sorted(body.mutates)) for body in graph.bodies.values()]),
    ]

"""Stages and nodes of a step, as data."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from speccompile.graph import stage as graph_stage
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import state_writes, written
from speccompile.passes.base import Pass
from speccompile.report.program_data import BodyReport, Node, Program, Region, StageReport
from speccompile.report.regions import op_name, regions_of_body, regions_of_passes, regions_of_step
from speccompile.report.traffic import Reads, body_values, of_call, of_step

CAPTURE = "Exports the model as a flat graph in which every tensor has a name."


@dataclass(frozen=True)
class Times:
    """Measured milliseconds of the last stage's nodes, and of the nodes of each body, summed over all calls."""

    of_nodes: Mapping[str, float] = field(default_factory=dict)
    of_bodies: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


def program(
    name: str,
    stages: Sequence[graph_stage.Stage],
    passes: Iterable[Pass],
    reads: Reads,
    *,
    base: graph_stage.Stage | None = None,
    times: Times | None = None,
) -> Program:
    """Stages of one pipeline, and the nodes of all of them.

    Args:
        passes: passes of the pipeline and of the pipelines before it.
        base: stage before the first one. Its nodes have ``since`` -1.
        times: of the last stage.
    """
    by_name = {item.name: item for item in passes}
    shown = tuple(_stage(stage, by_name.get(stage.name)) for stage in stages)
    before = [] if base is None else [base]
    graphs = [stage.graph for stage in (*before, *stages)]
    nodes = _history(graphs, -len(before), regions_of_passes(by_name.values()), reads)
    if times is not None:
        nodes = [replace(node, ms=times.of_nodes.get(node.name)) if node.until is None else node for node in nodes]
    return Program(name, shown, tuple(nodes))


def _stage(stage: graph_stage.Stage, made_by: Pass | None) -> StageReport:
    before = {} if stage.previous is None else stage.previous.op_counts
    after = stage.op_counts
    delta = {_short(name): after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    return StageReport(
        name=stage.name,
        summary=CAPTURE if made_by is None else first_sentence(type(made_by)),
        note=stage.note,
        seconds=stage.seconds,
        nodes=sum(after.values()),
        added={name: count for name, count in delta.items() if count > 0} if before else {},
        removed={name: -count for name, count in delta.items() if count < 0},
        requires=() if made_by is None else tuple(sorted(made_by.requires)),
        provides=() if made_by is None else tuple(sorted(made_by.provides)),
        python=stage.python,
        diff=stage.diff,
    )


def first_sentence(kind: type) -> str:
    """First sentence of the docstring of a class."""
    text = " ".join((inspect.getdoc(kind) or "").partition("\n\n")[0].split())
    return re.sub(r"``|:\w+:`~?([^`]*)`", r"\1", text.partition(". ")[0].removesuffix(".")) + "." if text else ""


def _short(name: str) -> str:
    return name.removeprefix("<built-in function ").removesuffix(">").removesuffix(".default")


def _history(
    graphs: Sequence[StepGraph], first: int, of_passes: Mapping[str, Region | None], reads: Reads
) -> list[Node]:
    """Nodes of all graphs. A node that several graphs have is listed once."""
    found: list[Node] = []
    live: dict[str, int] = {}
    for index, graph in enumerate(graphs, first):
        present: dict[str, int] = {}
        for node in step_nodes(graph, of_passes, reads, since=index):
            place = live.get(node.name)
            if place is not None and (found[place].op, found[place].added_by) == (node.op, node.added_by):
                found[place] = replace(node, since=found[place].since)
            else:
                place = len(found)
                found.append(node)
            present[node.name] = place
        kept = set(present.values())
        for place in live.values():
            if place not in kept:
                found[place] = replace(found[place], until=index)
        live = present
    return found


def step_nodes(graph: StepGraph, of_passes: Mapping[str, Region | None], reads: Reads, since: int = 0) -> list[Node]:
    """Calls of a graph, in order."""
    regions, nbytes, writes = regions_of_step(graph, of_passes), of_step(graph, reads), state_writes(graph)
    found = []
    for place, node in enumerate(graph.graph.nodes):
        if node.op not in ("call_function", "call_module"):
            continue
        changed = writes.get(node, set())
        states = [source.name for source in node.all_input_nodes if _is_state(graph, source.name)]
        found.append(
            Node(
                name=node.name,
                op=op_name(node),
                value=_text(node.meta.get("val")),
                region=regions[node],
                added_by=str(node.meta.get("pass") or "capture"),
                since=since,
                until=None,
                inputs=tuple(source.name for source in node.all_input_nodes if source.op != "placeholder"),
                reads=tuple(name for name in states if name not in changed or node.op == "call_module"),
                writes=tuple(sorted(changed)),
                body=str(node.target) if node.op == "call_module" else "",
                layer=node.meta.get("layer"),
                place=place,
                nbytes=nbytes[node],
            )
        )
    return found


def _is_state(graph: StepGraph, name: str) -> bool:
    return name in graph.ports and graph.ports[name].role == "state"


def _text(value: Any) -> str:
    """Dtype and shape of a tensor; empty for other values."""
    if not isinstance(value, torch.Tensor):
        return ""
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(map(str, value.shape))}]"


def bodies_of(graph: StepGraph, reads: Reads, times: Times | None = None) -> tuple[BodyReport, ...]:
    """Bodies that a step calls, with the bytes and times of all of their calls."""
    calls: dict[str, list[fx.Node]] = {}
    for node in graph.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    found = []
    for name, callers in calls.items():
        body = graph.bodies[name]
        regions = regions_of_body(graph, body)
        values = body_values(graph, callers[0])
        nbytes: dict[fx.Node, int] = {}
        for call in callers:
            for node, count in of_call(graph, call, reads, values).items():
                nbytes[node] = nbytes.get(node, 0) + count
        measured = {} if times is None else times.of_bodies.get(name, {})
        found.append(
            BodyReport(
                name,
                body.layers,
                tuple(
                    Node(
                        name=node.name,
                        op=op_name(node),
                        value=_text(values[node]),
                        region=region,
                        added_by="",
                        since=0,
                        until=None,
                        inputs=tuple(source.name for source in node.all_input_nodes if source.op != "placeholder"),
                        reads=tuple(source.name for source in node.all_input_nodes if source.op == "placeholder"),
                        writes=tuple(target.name for target in written(graph, node)),
                        body="",
                        layer=None,
                        place=place,
                        nbytes=nbytes[node],
                        ms=measured.get(node.name),
                    )
                    for place, (node, region) in enumerate(regions.items())
                ),
            )
        )
    return tuple(found)

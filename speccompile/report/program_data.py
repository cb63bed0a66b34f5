"""Graphs in a report: nodes, stages of a pipeline, bodies, and the kernels that a run of them calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Parts of a step, in the order in which they run. ``draft`` and ``propose`` belong to the drafter, before and after
#: the target. ``elementwise`` are the kernels between linears and attention in compiled layers. ``layers`` are layers
#: without such a division. ``host`` is the time between two steps.
Region = Literal[
    "draft",
    "inputs",
    "embedding",
    "qkv",
    "attention",
    "projection",
    "mlp",
    "elementwise",
    "layers",
    "lm_head",
    "choose",
    "commit",
    "propose",
    "other",
    "host",
]


@dataclass(frozen=True)
class Node:
    """One call in a graph.

    Args:
        op: name of the op or body that it calls.
        value: dtype and shape of the result; empty if there is no result, or several.
        added_by: pass that added it.
        since, until: index of the first stage that has it, and of the first later stage without it; None if the last
            stage has it.
        inputs: names of the nodes that it reads.
        reads, writes: names of buffers.
        body: name of the body that it calls; empty for an op.
        layer: decoder layer that it is a part of; None outside of layers.
        place: its position in the last graph that has it.
        nbytes: bytes of weights and of KV that it reads.
    """

    name: str
    op: str
    value: str
    region: Region
    added_by: str
    since: int
    until: int | None
    inputs: tuple[str, ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    body: str
    layer: int | None
    place: int
    nbytes: int
    ms: float | None = None


@dataclass(frozen=True)
class StageReport:
    """The graph after one pass.

    Args:
        summary: description of the pass.
        note: findings of the pass.
        seconds: duration of the pass.
        nodes: number of calls in the graph.
        added, removed: number of added and removed calls by op.
        python: the printed stage, a file that runs.
        diff: unified diff from the stage before.
    """

    name: str
    summary: str
    note: str
    seconds: float
    nodes: int
    added: dict[str, int]
    removed: dict[str, int]
    requires: tuple[str, ...]
    provides: tuple[str, ...]
    python: str
    diff: str


@dataclass(frozen=True)
class Program:
    """Stages of a pipeline, and the nodes of all of them."""

    name: str
    stages: tuple[StageReport, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class BodyReport:
    """A function for a group of equal decoder layers. ``nbytes`` and ``ms`` of a node are sums over a step."""

    name: str
    layers: tuple[int, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Kernel:
    """A kernel, or another call, in a run of ``caller``.

    Args:
        kind: see :class:`speccompile.lowering.kernel_list.KernelCall`.
        calls: in one run of the caller.
        nbytes: bytes of weights and KV that all calls of a step read.
        ms: sum over all calls of a step.
    """

    caller: str
    name: str
    kind: str
    calls: int
    nbytes: int
    ms: float | None
    floor_ms: float | None


@dataclass(frozen=True)
class Collective:
    """A collective between the ranks of a sharded model: ``calls`` times in one step, for all calls of ``caller``.

    Args:
        shape, dtype: of this rank's part.
        nbytes: of its parts in all calls.
    """

    caller: str
    name: str
    calls: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

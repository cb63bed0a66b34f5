"""What a report says of graphs: nodes, the stages of a pipeline, bodies, and what a run of them calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: Parts of a step, in the order in which they run. ``draft`` and ``propose`` are the drafter's, before and after the
#: target. ``elementwise`` is what compiled layers do between their linears and attention; ``layers`` are layers that
#: were not taken apart. ``host`` is the time between two steps.
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
        op: the op, or the body that it calls.
        value: dtype and shape of the result; empty for none or several.
        added_by: the pass that added it.
        since, until: indices of the first stage that has it, and of the first one that has it no longer; None if the
            last stage has it.
        inputs: names of the nodes that it reads.
        reads, writes: names of buffers.
        body: the name of the body that it calls; empty for an op.
        layer: the decoder layer that it is a part of; None outside of layers.
        place: its position in the last graph that has it.
        nbytes: of the weights and of the KV cache that it reads.
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
class Stage:
    """The graph as one pass left it.

    Args:
        summary: what the pass does.
        note: what it found.
        seconds: that the pass took.
        nodes: calls in the graph.
        added, removed: calls of each op that came and went.
        python: the printed stage, a file that runs.
        diff: to the stage before, as a unified difference.
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
    """Stages and the nodes of all of them."""

    name: str
    stages: tuple[Stage, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Body:
    """One function for a group of equal decoder layers. ``nbytes`` and ``ms`` of a node are those of all calls in a
    step."""

    name: str
    layers: tuple[int, ...]
    nodes: tuple[Node, ...]


@dataclass(frozen=True)
class Kernel:
    """What one run of ``caller`` calls.

    Args:
        kind: as :class:`speccompile.lowering.kernel_list.KernelCall` has it.
        calls: in one run of the caller.
        nbytes: of weights and KV that all calls of a step read.
        ms: of all calls of a step.
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
    """What the ranks of a sharded model send one another: ``calls`` times in one step, for all calls of ``caller``.

    Args:
        shape, dtype: of this rank's part; nbytes: of its parts in all calls.
    """

    caller: str
    name: str
    calls: int
    shape: tuple[int, ...]
    dtype: str
    nbytes: int

"""What a report contains, as plain data. The terminal, the HTML file and ``--json`` show this and nothing else.

Sizes are bytes, times are milliseconds unless a name says otherwise. A value that was not measured is None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

FORMAT = 1

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


@dataclass(frozen=True)
class RegionCost:
    """A part of a step: ``floor_ms`` is the time that memory needs for its bytes."""

    region: Region
    ms: float | None
    nbytes: int
    floor_ms: float | None


@dataclass(frozen=True)
class Measured:
    """Measured steps of one tier, over the dummy slot.

    Args:
        step_ms: the fastest of ``runs`` runs, which take turns with those of the other tiers.
        context: tokens of each row.
        how: how the parts were measured.
    """

    step_ms: float
    median_ms: float
    runs: int
    context: int
    how: str


@dataclass(frozen=True)
class Decoded:
    """Prompts that were decoded with the policy fixed to one tier.

    Args:
        tokens: that steps emitted.
        acceptance_length: over all steps. Where a lookup has no drafts, a smaller tier runs.
        own_steps, own_length: the steps that ran this very tier, and their acceptance length; None if it did not run.
        tier_steps: steps by the name of the tier that ran.
        step_ms: mean time of a step with the host's part, after the first token.
    """

    prompts: int
    tokens: int
    steps: int
    acceptance_length: float
    own_steps: int
    own_length: float | None
    tier_steps: dict[str, int]
    step_ms: float
    tokens_per_second: float
    per_position: tuple[float, ...]


@dataclass(frozen=True)
class TreeShape:
    """A tree of drafts. ``parents[i]`` is the parent of node i + 1; None for a dynamic tree."""

    nodes: int
    depth: int
    branches: int
    parents: tuple[int, ...] | None
    drawing: str


@dataclass(frozen=True)
class TierReport:
    """One tier.

    Args:
        draft_len: K, or the nodes of a tree.
        floor_ms: the time that memory needs for ``nbytes``, what a step reads.
        drafters: what runs before the step.
        buffers_read, buffers_written: names.
        collectives: of a sharded model; those of a body are of all its calls.
        cost: step time over that of K=0. It is the acceptance length at which the tier breaks even.
        explanation: why it takes the time that it takes, a sentence each.
    """

    name: str
    draft_len: int
    rows: int
    width: int
    kind: str
    tree: TreeShape | None
    program: Program
    bodies: tuple[Body, ...]
    drafters: tuple[Program, ...]
    kernels: tuple[Kernel, ...]
    regions: tuple[RegionCost, ...]
    nbytes: int
    floor_ms: float | None
    measured: Measured | None
    decoded: Decoded | None
    cost: float | None
    buffers_read: tuple[str, ...]
    buffers_written: tuple[str, ...]
    explanation: tuple[str, ...] = ()
    collectives: tuple[Collective, ...] = ()


@dataclass(frozen=True)
class Buffer:
    """One state tensor of the arena; ``group`` is ``KV``, ``sequence``, ``drafter``, ``sampling``, ``adapters``,
    ``recurrent state`` or ``host``."""

    name: str
    group: str
    shape: tuple[int, ...]
    dtype: str
    nbytes: int


@dataclass(frozen=True)
class MemoryItem:
    """Bytes under a path of names, such as ``("model", "layers", "mlp.up_proj")``; ``count`` tensors."""

    path: tuple[str, ...]
    nbytes: int
    count: int


@dataclass(frozen=True)
class Saving:
    """What another option of ``wrap`` would save; negative if it costs."""

    option: str
    nbytes: int
    reason: str


@dataclass(frozen=True)
class Memory:
    """Everything that a wrap holds. ``kv_bytes_per_token`` are those of one slot."""

    items: tuple[MemoryItem, ...]
    savings: tuple[Saving, ...]
    kv_bytes_per_token: int
    slots: int
    max_len: int

    @property
    def nbytes(self) -> int:
        """Bytes of all items."""
        return sum(item.nbytes for item in self.items)


@dataclass(frozen=True)
class Span:
    """A part of a build, and the parts of it."""

    name: str
    seconds: float
    parts: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """Something that works with less than it could: ``what`` is used, for ``reason``; ``advice`` is what to do."""

    what: str
    reason: str
    advice: str


@dataclass(frozen=True)
class Acceptance:
    """Counts of the requests that the engine has run: per draft position, and steps and seconds by name of the tier."""

    acceptance_length: float
    steps: int
    emitted: int
    proposed_at: tuple[int, ...]
    accepted_at: tuple[int, ...]
    tier_steps: dict[str, int]
    tier_seconds: dict[str, float]


@dataclass(frozen=True)
class TraceStep:
    """A step of a recorded trace, an entry for each row."""

    draft_len: int
    requests: tuple[int, ...]
    proposed: tuple[int, ...]
    accepted: tuple[int, ...]
    emitted: tuple[int, ...]
    ms: float | None


@dataclass(frozen=True)
class TraceReport:
    """The steps of a recorded trace; ``name`` is its file, or what was decoded."""

    name: str
    draft_lens: tuple[int, ...]
    steps: tuple[TraceStep, ...]


@dataclass(frozen=True)
class Machine:
    """Where it was measured; ``bandwidth`` is bytes a second that reading a large tensor reached."""

    device: str
    processor: str
    threads: int
    bandwidth: float | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Subject:
    """What was wrapped. ``explanation`` are the lines of ``spec.explain()`` by name."""

    model: str
    layers: int
    dtype: str
    mode: str
    backend: str | None
    max_batch: int
    max_len: int
    explanation: dict[str, str]


@dataclass(frozen=True)
class Executable:
    """A line for every executable: tiers of all row counts, and prefill chunks."""

    name: str
    rows: int
    width: int
    ops: int
    bodies: dict[str, int]


@dataclass(frozen=True)
class Report:
    """All of it. ``verdict`` are sentences, the most important one first."""

    format: int
    subject: Subject
    machine: Machine
    verdict: tuple[str, ...]
    fallbacks: tuple[Fallback, ...]
    model: Program
    tiers: tuple[TierReport, ...]
    executables: tuple[Executable, ...]
    buffers: tuple[Buffer, ...]
    memory: Memory
    build: Span | None
    acceptance: Acceptance | None
    trace: TraceReport | None

    def as_json(self) -> dict[str, Any]:
        """Plain values: dicts, lists, texts and numbers."""
        return asdict(self)

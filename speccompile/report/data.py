"""What a report contains, as plain data. The terminal, the HTML file and ``--json`` show this and nothing else.

Sizes are bytes, times are milliseconds unless a name says otherwise. A value that was not measured is None.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from speccompile.report.memory_data import Buffer, Memory
from speccompile.report.program_data import Body, Collective, Kernel, Program
from speccompile.report.run_data import AcceptanceCounts, Decoded, Measured, RegionCost, TraceReport

FORMAT = 1


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
    acceptance: AcceptanceCounts | None
    trace: TraceReport | None

    def as_json(self) -> dict[str, Any]:
        """Plain values: dicts, lists, texts and numbers."""
        return asdict(self)

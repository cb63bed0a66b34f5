"""Contents of a report, as plain data. The terminal, the HTML file and ``--json`` show this and nothing else.

Sizes are in bytes, and times in milliseconds unless a name has another unit. None is a value that was not measured.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from speccompile.report.memory_data import Buffer, Memory
from speccompile.report.program_data import BodyReport, Collective, Kernel, Program
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
    """Report of one tier.

    Args:
        draft_len: K, or the nodes of a tree.
        floor_ms: time to read ``nbytes``, the bytes that a step reads, from memory.
        drafters: programs that run before the step.
        buffers_read, buffers_written: names of state tensors.
        collectives: of a sharded model. An entry of a body covers all of its calls.
        cost: step time over that of K=0. It is the acceptance length at which the tier breaks even.
        explanation: sentences that explain the step time.
    """

    name: str
    draft_len: int
    rows: int
    width: int
    kind: str
    tree: TreeShape | None
    program: Program
    bodies: tuple[BodyReport, ...]
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
    """One part of a build, and its own parts."""

    name: str
    seconds: float
    parts: tuple[Span, ...] = ()


@dataclass(frozen=True)
class Fallback:
    """A slower path in use. ``what``: the path; ``reason``: why it is used; ``advice``: how to avoid it."""

    what: str
    reason: str
    advice: str


@dataclass(frozen=True)
class Machine:
    """The measured machine. ``bandwidth``: bytes per second when a large tensor is read."""

    device: str
    processor: str
    threads: int
    bandwidth: float | None
    versions: dict[str, str]


@dataclass(frozen=True)
class Subject:
    """The wrapped model and its options. ``explanation``: the lines of ``spec.explain()`` by name."""

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
    """One executable: a tier at one row count, or a prefill chunk."""

    name: str
    rows: int
    width: int
    ops: int
    bodies: dict[str, int]


@dataclass(frozen=True)
class Report:
    """A whole report. ``verdict``: sentences, the most important one first."""

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
        """Convert to plain values: dicts, lists, strings and numbers."""
        return asdict(self)

"""A finished step: the graph after the passes of one pipeline, as printed Python."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from speccompile.graph.port import Port
from speccompile.graph.stage import Stages


@dataclass(frozen=True)
class FinishedStep:
    """A step after all passes of its pipeline.

    Args:
        source: the step as Python that runs.
        ports: the arguments of ``step``, in order.
        rows, width: B and T.
        stages: the stages of the model and of this pipeline.
        name: the name under which it is stored; None if it is not stored.
        drafter: the step of a split drafter, which runs before this one.
    """

    source: str = field(repr=False)
    ports: tuple[Port, ...] = field(repr=False)
    rows: int
    width: int
    stages: Stages = field(repr=False)
    name: str | None
    drafter: FinishedStep | None = None

    def file(self) -> bytes:
        """The bytes of its stored file: source, names of ports, and sizes, as JSON."""
        ports = [port.name for port in self.ports]
        return json.dumps({"source": self.source, "ports": ports, "rows": self.rows, "width": self.width}).encode()

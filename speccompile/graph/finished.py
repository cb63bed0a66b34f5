"""A finished step: what the passes of one pipeline left, printed."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from speccompile.graph.port import Port
from speccompile.graph.stage import Stages


@dataclass(frozen=True)
class FinishedStep:
    """What the passes of one pipeline left.

    Args:
        source: it as Python that runs.
        ports: what ``step`` takes, in order.
        rows, width: B and T.
        stages: those of the model and of this pipeline.
        name: what it is stored under, None if it is not.
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
        """What is stored of it."""
        ports = [port.name for port in self.ports]
        return json.dumps({"source": self.source, "ports": ports, "rows": self.rows, "width": self.width}).encode()

"""What a pass is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from speccompile.graph.step_graph import StepGraph

Facts = frozenset[str]


def facts(*names: str) -> Facts:
    return frozenset(names)


@dataclass(frozen=True)
class Changes:
    """What a pass did: how many places it changed, and a line for people."""

    matched: int
    note: str = ""


@dataclass(frozen=True)
class Pass(ABC):
    """One transformation of a step graph, configured by its fields alone.

    ``requires`` are facts that hold before it, ``provides`` facts that hold after it, ``invalidates`` facts that no
    longer do. The pipeline derives the order from them. A pass that changes nothing raises
    :class:`~speccompile.errors.NothingMatched`, unless it is ``optional``.
    """

    name: ClassVar[str]
    looks_for: ClassVar[str]
    requires: ClassVar[Facts] = facts()
    provides: ClassVar[Facts] = facts()
    invalidates: ClassVar[Facts] = facts()
    optional: ClassVar[bool] = False

    @abstractmethod
    def run(self, graph: StepGraph) -> Changes:
        """Edit ``graph`` in place."""

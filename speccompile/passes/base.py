"""The base class of passes, and the facts by which pipelines order them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

from speccompile.graph.state import StateSpec
from speccompile.graph.step_graph import StepGraph

Facts = frozenset[str]

#: The part of a step that a pass adds calls to. ``model``: it changes calls of the model, whose place in it is their
#: region.
PassRegion = Literal["draft", "inputs", "choose", "commit", "propose", "other", "model"]


def facts(*names: str) -> Facts:
    """A set of facts, for ``requires``, ``provides`` and ``invalidates``."""
    return frozenset(names)


@dataclass(frozen=True)
class Changes:
    """Result of a pass: the number of changes, and a line for people."""

    matched: int
    note: str = ""


@dataclass(frozen=True)
class Pass(ABC):
    """One transformation of a step graph, configured only by its fields.

    ``requires`` are facts that hold before it, ``provides`` facts that hold after it, ``invalidates`` facts that no
    longer do. They check the order of a pipeline. ``named_values`` are values that later passes read by these names
    (``graph.values``): an error about a value that is missing gives the passes that name it. ``region`` is the part of
    a step to which reports count its calls. A pass that changes nothing raises
    :class:`~speccompile.errors.NothingMatched`, unless it is ``optional``.

    A pass for ``wrap(passes=[...])`` also has an anchor: ``after`` or ``before`` names the pass next to which it runs,
    or several, of which a pipeline has one (``("verify_inputs", "mixed_inputs")``). It is inserted into every pipeline
    that has its anchor: of tiers, mixed tiers, prompt chunks, the drafter, the captured model. It may write the state
    tensors of :meth:`state_specs`, and of others only those that ``writes`` names.
    """

    name: ClassVar[str]
    named_values: ClassVar[tuple[str, ...]] = ()
    looks_for: ClassVar[str]
    region: ClassVar[PassRegion] = "other"
    requires: ClassVar[Facts] = facts()
    provides: ClassVar[Facts] = facts()
    invalidates: ClassVar[Facts] = facts()
    optional: ClassVar[bool] = False
    after: ClassVar[str | tuple[str, ...]] = ()
    before: ClassVar[str | tuple[str, ...]] = ()
    writes: ClassVar[frozenset[str]] = frozenset()

    def state_specs(self) -> list[StateSpec]:
        """The pass's own state tensors. The arena of a wrap that runs the pass has them, under their names."""
        return []

    @property
    def anchors_after(self) -> tuple[str, ...]:
        """The names in ``after``, as a tuple."""
        return (self.after,) if isinstance(self.after, str) else self.after

    @property
    def anchors_before(self) -> tuple[str, ...]:
        """The names in ``before``, as a tuple."""
        return (self.before,) if isinstance(self.before, str) else self.before

    @property
    def is_users(self) -> bool:
        """It was given to ``wrap``: passes of this package stand in the lists of pipelines, and need no anchor."""
        return bool(self.anchors_after or self.anchors_before)

    @abstractmethod
    def run(self, graph: StepGraph) -> Changes:
        """Edit ``graph`` in place."""

"""Runs passes in the order that their facts ask for, verifies after each, and keeps every stage."""

from __future__ import annotations

import difflib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import networkx as nx

from speccompile.errors import MissingFact, NothingMatched, PassOrderError, UnknownStage
from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass
from speccompile.passes.printing import callable_of, load_python, to_python
from speccompile.passes.verify import verify


@dataclass(frozen=True)
class Stage:
    """The graph as one pass left it."""

    name: str
    tier: str
    graph: StepGraph = field(repr=False)
    seconds: float
    note: str = ""
    previous: Stage | None = field(default=None, repr=False)

    @cached_property
    def python(self) -> str:
        """The stage as a Python file that runs."""
        return to_python(self.graph, f"Stage {self.name!r} of {self.tier}.")

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The printed file's ``step``."""
        return callable_of(self.python, f"<{self.tier}/{self.name}>")

    def make_inputs(self, seed: int = 0) -> list[Any]:
        """Random inputs for ``call``, from the printed file."""
        inputs: list[Any] = load_python(self.python, f"<{self.tier}/{self.name}>")["make_inputs"](seed)
        return inputs

    @property
    def op_counts(self) -> dict[str, int]:
        return self.graph.op_counts()

    @property
    def diff(self) -> str:
        """Unified text difference to the stage before; empty for the first."""
        if self.previous is None:
            return ""
        before, after = self.previous.python.splitlines(), self.python.splitlines()
        return "\n".join(difflib.unified_diff(before, after, self.previous.name, self.name, lineterm="", n=1))


class Stages(Mapping[str, Stage]):
    """The stages of one tier, in the order they ran, by name of the pass.

    Args:
        stages: them, or what makes them when somebody first looks.
    """

    def __init__(self, stages: Iterable[Stage] | Callable[[], Stages]) -> None:
        self._given = stages

    @cached_property
    def _stages(self) -> dict[str, Stage]:
        stages = self._given().values() if callable(self._given) else self._given
        return {stage.name: stage for stage in stages}

    def __getitem__(self, name: str) -> Stage:
        if name not in self._stages:
            raise UnknownStage(name=name, tier=self.last.tier, available=", ".join(self._stages))
        return self._stages[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stages

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def followed_by(self, later: Stages) -> Stages:
        """These stages and, behind them, those of ``later`` that are not among them."""
        return Stages([*self._stages.values(), *(later[name] for name in later if name not in self)])

    @property
    def last(self) -> Stage:
        return next(reversed(self._stages.values()))


@dataclass(frozen=True)
class Pipeline:
    """A set of passes and the facts that must hold when they are through.

    Raises:
        MissingFact: at :meth:`order`, when a pass or a goal needs what nothing provides.
        PassOrderError: when no order serves all passes.
    """

    passes: tuple[Pass, ...]
    goals: Facts
    tier: str = "a step graph"

    def without(self, name: str) -> Pipeline:
        """The same pipeline less the pass ``name``: for bisecting, and to see what depends on it."""
        if name not in [item.name for item in self.passes]:
            raise UnknownStage(name=name, tier=self.tier, available=", ".join(p.name for p in self.passes))
        return Pipeline(tuple(p for p in self.passes if p.name != name), self.goals, self.tier)

    def order(self, initial: Iterable[str]) -> list[Pass]:
        """The passes, each behind the producers of what it requires; ties by declaration."""
        provided = set(initial).union(*(item.provides for item in self.passes))
        for item in self.passes:
            _require(item.requires, provided, f"pass {item.name!r}")
        _require(self.goals, provided, self.tier)
        graph = nx.DiGraph()
        graph.add_nodes_from(range(len(self.passes)))
        for i, first in enumerate(self.passes):
            for j, second in enumerate(self.passes):
                if i != j and first.provides & second.requires:
                    graph.add_edge(i, j)
                if i != j and first.requires & second.invalidates:
                    graph.add_edge(i, j)
        try:
            order = list(nx.lexicographical_topological_sort(graph))
        except nx.NetworkXUnfeasible:
            cycle = " -> ".join(self.passes[i].name for i, _ in nx.find_cycle(graph))
            raise PassOrderError(cycle=cycle) from None
        return [self.passes[i] for i in order]

    def run(self, graph: StepGraph, first: Stage | None = None) -> tuple[StepGraph, Stages]:
        """Run all passes on a copy of ``graph``; ``first`` is the stage that it comes from."""
        graph = graph.copy()
        stages = [] if first is None else [first]
        started = time.perf_counter()
        for item, changes in self._passes(graph):
            seconds = time.perf_counter() - started
            previous = stages[-1] if stages else None
            stages.append(Stage(item.name, self.tier, graph.copy(), seconds, changes.note, previous))
            started = time.perf_counter()
        return graph, Stages(stages)

    def finish(self, graph: StepGraph) -> StepGraph:
        """What :meth:`run` leaves of ``graph``, without the stages in between, whose copies take time."""
        graph = graph.copy()
        for _ in self._passes(graph):
            pass
        return graph

    def _passes(self, graph: StepGraph) -> Iterator[tuple[Pass, Changes]]:
        """Run them on ``graph`` itself, one with each turn."""
        for item in self.order(graph.facts):
            _require(item.requires, graph.facts, f"pass {item.name!r}")
            changes = item.run(graph)
            if changes.matched == 0 and not item.optional:
                raise NothingMatched(name=item.name, looked_for=item.looks_for)
            self._finish(graph, item)
            yield item, changes
        _require(self.goals, graph.facts, self.tier)

    def _finish(self, graph: StepGraph, item: Pass) -> None:
        graph.facts = (graph.facts - item.invalidates) | item.provides
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_module"):
                node.meta.setdefault("pass", item.name)
        verify(graph, item.name)


def _require(needed: Iterable[str], provided: Iterable[str], consumer: str) -> None:
    for fact in sorted(set(needed) - set(provided)):
        raise MissingFact(consumer=consumer, fact=fact, provided=", ".join(sorted(provided)) or "nothing")

"""Runs passes in the order that their facts ask for, verifies after each, and keeps every stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from speccompile.errors import MissingFact, NothingMatched, PassOrderError, UnknownStage
from speccompile.graph.stage import Stage, Stages
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.passes.base import Changes, Facts, Pass


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

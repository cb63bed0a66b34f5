"""Runs passes in the order of their list, checks their facts, verifies after each, and keeps every stage."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import networkx as nx

from speccompile.errors import (
    InvalidatedFact,
    MissingFact,
    NothingMatched,
    PassOrderError,
    UnknownStage,
)
from speccompile.graph.stage import Stage, Stages
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import verify
from speccompile.passes.base import Changes, Facts, Pass
from speccompile.passes.user_pass import Before, run_user_pass


@dataclass(frozen=True)
class Pipeline:
    """Passes in running order, and the facts that hold after the last one.

    Raises:
        MissingFact: by :meth:`check` and :meth:`run`, a pass or a goal needs what nothing before it provides.
        InvalidatedFact: the same, and a pass in between has invalidated it.
        PassOrderError: a pass needs what only a later one provides.
    """

    passes: tuple[Pass, ...]
    goals: Facts
    tier: str = "a step graph"

    def without(self, name: str) -> Pipeline:
        """This pipeline without the pass ``name``: for bisecting, and to see what depends on it."""
        if name not in [item.name for item in self.passes]:
            raise UnknownStage(name=name, tier=self.tier, available=", ".join(p.name for p in self.passes))
        return Pipeline(tuple(p for p in self.passes if p.name != name), self.goals, self.tier)

    def check(self, initial: Iterable[str]) -> None:
        """Follow the facts through the passes, before any of them runs."""
        held = set(initial)
        #: By fact, the pass that invalidated it.
        ended: dict[str, str] = {}
        for place, item in enumerate(self.passes):
            for fact in sorted(item.requires - held):
                if fact in ended:
                    raise _ended(f"pass {item.name!r}", fact, ended[fact])
                later = [other.name for other in self.passes[place + 1 :] if fact in other.provides]
                if later:
                    cycle = f"{item.name} -> {later[0]} -> {item.name}"
                    raise PassOrderError(consumer=item.name, fact=fact, producer=later[0], cycle=cycle)
                raise _missing(f"pass {item.name!r}", fact, held)
            ended |= dict.fromkeys((held & item.invalidates) - item.provides, item.name)
            held = (held - item.invalidates) | item.provides
        for fact in sorted(self.goals - held):
            raise _ended(self.tier, fact, ended[fact]) if fact in ended else _missing(self.tier, fact, held)

    def dependencies(self) -> nx.MultiDiGraph:
        """The graph of passes: names as nodes, in running order, and for each fact that a pass requires an edge from
        the last pass before it that provides it, with the attribute ``fact``. Goals are edges to the tier's name.
        Facts that hold from the start have no edge.
        """
        graph = nx.MultiDiGraph()
        graph.add_nodes_from([*(item.name for item in self.passes), self.tier])
        producers: dict[str, str] = {}
        for item in self.passes:
            needed = sorted(item.requires & producers.keys())
            graph.add_edges_from((producers[fact], item.name, {"fact": fact}) for fact in needed)
            for fact in item.invalidates:
                producers.pop(fact, None)
            producers |= dict.fromkeys(item.provides, item.name)
        facts = sorted(self.goals & producers.keys())
        graph.add_edges_from((producers[fact], self.tier, {"fact": fact}) for fact in facts)
        return graph

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
        """The finished graph of :meth:`run`, without the stages in between: copying them is slow."""
        graph = graph.copy()
        for _ in self._passes(graph):
            pass
        return graph

    def _passes(self, graph: StepGraph) -> Iterator[tuple[Pass, Changes]]:
        """Run the passes on ``graph`` itself, one for each item of the iterator."""
        self.check(graph.facts)
        for item in self.passes:
            before = Before.of(graph) if item.is_users else None
            changes = run_user_pass(item, graph) if item.is_users else item.run(graph)
            if changes.matched == 0 and not item.optional:
                raise NothingMatched(name=item.name, looked_for=item.looks_for)
            self._finish(graph, item)
            if before is not None:
                before.check(item, graph)
            yield item, changes

    def _finish(self, graph: StepGraph, item: Pass) -> None:
        graph.facts = (graph.facts - item.invalidates) | item.provides
        for node in graph.graph.nodes:
            if node.op in ("call_function", "call_module"):
                node.meta.setdefault("pass", item.name)
        verify(graph, item.name)


def _ended(consumer: str, fact: str, by: str) -> InvalidatedFact:
    return InvalidatedFact(consumer=consumer, fact=fact, by=by)


def _missing(consumer: str, fact: str, held: Iterable[str]) -> MissingFact:
    return MissingFact(consumer=consumer, fact=fact, provided=", ".join(sorted(held)) or "nothing")

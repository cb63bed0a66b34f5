"""A pass of the user's own at work: whatever goes wrong in it names it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import fx

from speccompile.errors import PassFailed, SpecCompileError, VerifierError, error_line
from speccompile.graph.state import StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import state_writes
from speccompile.passes.base import Changes, Pass

T = TypeVar("T")


def run_own(item: Pass, graph: StepGraph) -> Changes:
    """Run ``item`` on ``graph``.

    Raises:
        PassFailed: it raised, or returned something else than what it did.
        VerifierError: it changed which state is written, and does not declare that.
    """
    before = state_writes(graph)
    changes = _called(item, lambda: item.run(graph))
    if not isinstance(changes, Changes) or not isinstance(changes.matched, int):
        raise PassFailed(name=item.name, reason=f"its run() has to return Changes(int), and returned {changes!r}")
    _check_writes(item, before, state_writes(graph))
    return changes


def specs_of(item: Pass) -> list[StateSpec]:
    """State tensors of its own.

    Raises:
        PassFailed: its ``state_specs()`` raises, or returns something else.
    """
    specs = _called(item, item.state_specs)
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, StateSpec) for spec in specs):
        raise PassFailed(name=item.name, reason=f"its state_specs() has to return a list of StateSpec, not {specs!r}")
    for spec in specs:
        if not spec.name.isidentifier():
            raise PassFailed(
                name=item.name, reason=f"the name of a state tensor has to be an identifier: {spec.name!r}"
            )
    return list(specs)


def _called(item: Pass, function: Callable[[], T]) -> T:
    try:
        return function()
    except SpecCompileError as error:
        raise PassFailed(name=item.name, reason=str(error)) from error
    except Exception as error:
        raise PassFailed(name=item.name, reason=error_line(error)) from error


def _check_writes(item: Pass, before: dict[fx.Node, set[str]], after: dict[fx.Node, set[str]]) -> None:
    """It may write the state that it declares, and has to leave all other writes as they are."""
    declared = {spec.name for spec in specs_of(item)} | item.writes
    empty: set[str] = set()
    for node in [*before, *after]:
        had, has = before.get(node, empty), after.get(node, empty)
        for name in sorted((has - had) - declared):
            raise VerifierError(
                name=item.name,
                problem=f"it writes the state tensor {name!r}, which it does not declare: name it in writes, or write "
                "a tensor of the pass's own state_specs()",
            )
        for name in sorted((had - has) - declared):
            raise VerifierError(
                name=item.name,
                problem=f"it takes away a write of the state tensor {name!r}, which it does not declare: name it in "
                "writes",
            )

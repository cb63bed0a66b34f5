"""Runs a pass of the user. Every error in it names the pass."""

from __future__ import annotations

import keyword
from collections.abc import Callable
from typing import TypeVar

import sympy
import torch
from torch import fx

from speccompile.errors import PassFailed, SpecCompileError, VerifierError, error_line
from speccompile.graph.state import SIZES, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import state_writes
from speccompile.passes.base import Changes, Pass

T = TypeVar("T")


def run_user_pass(item: Pass, graph: StepGraph) -> Changes:
    """Run ``item`` on ``graph``.

    Raises:
        PassFailed: it raised, or did not return ``Changes``.
        VerifierError: it added or removed a write of state that it does not declare.
    """
    before = state_writes(graph)
    changes = _call(item, lambda: item.run(graph))
    if not isinstance(changes, Changes) or not isinstance(changes.matched, int):
        raise PassFailed(name=item.name, reason=f"its run() has to return Changes(int), and returned {changes!r}")
    _check_writes(item, before, state_writes(graph))
    return changes


def state_specs_of(item: Pass) -> list[StateSpec]:
    """The state tensors of ``item``.

    Raises:
        PassFailed: its ``state_specs()`` raises, or returns something else.
    """
    specs = _call(item, item.state_specs)
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, StateSpec) for spec in specs):
        raise PassFailed(name=item.name, reason=f"its state_specs() has to return a list of StateSpec, not {specs!r}")
    for spec in specs:
        if problem := _problem_of(spec):
            raise PassFailed(name=item.name, reason=f"{problem} of a state tensor {spec.name!r}")
    return list(specs)


def _problem_of(spec: StateSpec) -> str:
    """What is wrong with ``spec``, empty if nothing is."""
    if not isinstance(spec.name, str) or not spec.name.isidentifier() or keyword.iskeyword(spec.name):
        return "a name that is not an identifier"
    if not isinstance(spec.shape, tuple):
        return f"the shape {spec.shape!r}, which is not a tuple,"
    for size in spec.shape:
        whole = isinstance(size, int) and size >= 0
        if not whole and not (isinstance(size, sympy.Expr) and size.free_symbols <= SIZES):
            return f"the size {size!r}, which is neither an int nor made of {', '.join(sorted(map(str, SIZES)))},"
    if not isinstance(spec.dtype, torch.dtype):
        return f"the dtype {spec.dtype!r}, which is not a torch.dtype,"
    if not isinstance(spec.fill, int | float):
        return f"the fill {spec.fill!r}, which is not a number,"
    return ""


def _call(item: Pass, function: Callable[[], T]) -> T:
    try:
        return function()
    except SpecCompileError as error:
        raise PassFailed(name=item.name, reason=str(error)) from error
    except Exception as error:
        raise PassFailed(name=item.name, reason=error_line(error)) from error


def _check_writes(item: Pass, before: dict[fx.Node, set[str]], after: dict[fx.Node, set[str]]) -> None:
    """Check that the pass added and removed only writes of the state that it declares."""
    declared = {spec.name for spec in state_specs_of(item)} | item.writes
    empty: set[str] = set()
    for node in [*before, *after]:
        written_before, written_after = before.get(node, empty), after.get(node, empty)
        for name in sorted((written_after - written_before) - declared):
            raise VerifierError(
                name=item.name,
                problem=f"it writes the state tensor {name!r}, which it does not declare: name it in writes, or write "
                "a tensor of the pass's own state_specs()",
            )
        for name in sorted((written_before - written_after) - declared):
            raise VerifierError(
                name=item.name,
                problem=f"it takes away a write of the state tensor {name!r}, which it does not declare: name it in "
                "writes",
            )

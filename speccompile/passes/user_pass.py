"""Runs a pass of the user. Every error in it names the pass."""

from __future__ import annotations

import difflib
import inspect
import keyword
import math
import os
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import sympy
import torch
from torch import fx

from speccompile.errors import PassFailed, SpecCompileError, UnknownValue, VerifierError, error_line
from speccompile.graph.state import SIZES, StateSpec
from speccompile.graph.step_graph import StepGraph
from speccompile.graph.verify import state_writes
from speccompile.passes.base import Changes, Pass
from speccompile.utils.torch_private import DataDependentOutputException, DynamicOutputShapeException

T = TypeVar("T")

#: Folders of torch and of this package.
_FOLDERS = tuple(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1]))


def run_user_pass(item: Pass, graph: StepGraph) -> Changes:
    """Run ``item`` on ``graph``.

    Raises:
        PassFailed: it raised, or did not return ``Changes``.
    """
    changes = _call(item, lambda: item.run(graph))
    if not isinstance(changes, Changes) or not isinstance(changes.matched, int):
        raise PassFailed(name=item.name, reason=f"its run() must return Changes(int), and returned {changes!r}")
    return changes


@dataclass(frozen=True)
class Before:
    """Properties of a graph on which later passes rely, before a pass of the user runs."""

    writes: dict[fx.Node, set[str]]
    #: Dtype and number of dimensions, by the name of a value.
    kinds: dict[str, tuple[torch.dtype, int]]

    @classmethod
    def of(cls, graph: StepGraph) -> Self:
        """Read the properties of ``graph``, before the pass runs on it."""
        return cls(state_writes(graph), _kinds(graph))

    def check(self, item: Pass, graph: StepGraph) -> None:
        """Check the graph that ``item`` has changed, and whose shapes are computed.

        Raises:
            VerifierError: it added or removed a write of state that it does not declare, or gave the name of a value to
                another kind of tensor.
        """
        _check_writes(item, self.writes, state_writes(graph))
        kinds = _kinds(graph)
        for name, kind in self.kinds.items():
            if (new := kinds.get(name, kind)) != kind:
                problem = f"the value {name!r} was {kind[0]} of {kind[1]} dimensions, and is {new[0]} of {new[1]}"
                raise VerifierError(name=item.name, problem=f"{problem}: give the new one another name")


def _kinds(graph: StepGraph) -> dict[str, tuple[torch.dtype, int]]:
    return {name: (node.meta["val"].dtype, node.meta["val"].ndim) for name, node in graph.values.items()}


def state_specs_of(item: Pass) -> list[StateSpec]:
    """The state tensors of ``item``.

    Raises:
        PassFailed: its ``state_specs()`` raises, or returns something else.
    """
    specs = _call(item, item.state_specs)
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, StateSpec) for spec in specs):
        raise PassFailed(name=item.name, reason=f"its state_specs() must return a list of StateSpec, not {specs!r}")
    for spec in specs:
        if problem := _problem_of(spec):
            raise PassFailed(name=item.name, reason=f"{problem} of a state tensor {spec.name!r}")
    return list(specs)


def _problem_of(spec: StateSpec) -> str:
    """The error in ``spec``; empty for a valid one."""
    if not isinstance(spec.name, str) or not spec.name.isidentifier() or keyword.iskeyword(spec.name):
        return "a name that is not an identifier"
    if not isinstance(spec.shape, tuple):
        return f"the shape {spec.shape!r}, which is not a tuple,"
    for size in spec.shape:
        whole = isinstance(size, int) and size >= 0
        if not whole and not (isinstance(size, sympy.Expr) and size.free_symbols <= SIZES):
            return f"the size {size!r}, neither an int nor an expression of {', '.join(sorted(map(str, SIZES)))},"
    if not isinstance(spec.dtype, torch.dtype):
        return f"the dtype {spec.dtype!r}, which is not a torch.dtype,"
    if not isinstance(spec.fill, int | float):
        return f"the fill {spec.fill!r}, which is not a number,"
    if not _holds(spec.dtype, spec.fill):
        return f"the fill {spec.fill!r}, which {spec.dtype} does not hold,"
    return ""


def _holds(dtype: torch.dtype, fill: float) -> bool:
    if dtype.is_floating_point or dtype.is_complex:
        return not math.isfinite(fill) or abs(fill) <= torch.finfo(dtype).max
    if dtype is torch.bool:
        return fill in (0, 1)
    return math.isfinite(fill) and fill == int(fill) and torch.iinfo(dtype).min <= fill <= torch.iinfo(dtype).max


def _call(item: Pass, function: Callable[[], T]) -> T:
    try:
        return function()
    except UnknownValue as error:
        raise PassFailed(name=item.name, reason=f"{error} {_where_named(str(error.fields['name']))}") from error
    except SpecCompileError as error:
        raise PassFailed(name=item.name, reason=str(error).rstrip(".")) from error
    except DataDependentOutputException as error:
        reason = (
            f"{_line_of_user(error)} reads the value of a tensor in Python (an `if`, a loop, int(), .item()), and the "
            "pass runs before there are values: choose by torch.where, and compare tensors"
        )
        raise PassFailed(name=item.name, reason=reason) from error
    except DynamicOutputShapeException as error:
        reason = (
            f"{_line_of_user(error)} computes a tensor whose size depends on values ({error.func}), and shapes of a "
            "step are fixed: choose by torch.where"
        )
        raise PassFailed(name=item.name, reason=reason) from error
    except Exception as error:
        raise PassFailed(name=item.name, reason=error_line(error)) from error


def _where_named(value: str) -> str:
    """Advice about a value that the graph does not have, for the end of a sentence."""
    named_by = passes_by_value()
    if value not in named_by:
        close = difflib.get_close_matches(value, named_by, n=1)
        return f"Did you mean {close[0]!r}?" if close else "docs/architecture/passes.md lists all values"
    *others, last = map(repr, named_by[value])
    passes = f"{', '.join(others)} or {last}" if others else last
    return f"Pass {passes} names it, if the pipeline has that pass: set after to it"


def passes_by_value() -> dict[str, list[str]]:
    """For each value of a step the names of the passes after which later passes read it: a pipeline has one of them, or
    none. The capture names ``logits``."""
    found: dict[str, list[str]] = {}
    for item in _derived(Pass):
        for value in () if inspect.isabstract(item) else item.named_values:
            found.setdefault(value, []).append(item.name)
    return found


def _derived(base: Any) -> Iterator[Any]:
    for item in base.__subclasses__():
        yield item
        yield from _derived(item)


def _line_of_user(error: Exception) -> str:
    """``file:line (source)`` of the last line in ``error``'s traceback that is neither torch's nor of this package."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_FOLDERS)]
    return f"{frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})" if frames else "it"


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
                problem=f"it removes a write of the state tensor {name!r}, which it does not declare: name it in "
                "writes",
            )

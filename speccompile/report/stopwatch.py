"""Times every statement of a printed step. The code runs with a call of :func:`lap` after each statement."""

from __future__ import annotations

import ast
import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator

#: Seconds by function and statement.
Laps = dict[tuple[str, int], float]

_LAP, _NOW = "_report_lap", "_report_now"
_HEADER = f"from speccompile.report.stopwatch import lap as {_LAP}, now as {_NOW}"
#: Functions of a printed stage that are not part of a step.
_NO_STEP = frozenset({"make_inputs"})

now = time.perf_counter
_laps: Laps = defaultdict(float)


def lap(function: str, statement: int, since: float) -> float:
    """Add the time since ``since`` to a statement. Returns the time at its end, which excludes the work of ``lap``."""
    _laps[function, statement] += now() - since
    return now()


@contextlib.contextmanager
def timing() -> Iterator[Laps]:
    """Collect the seconds of the statements that run in this context, summed over their runs."""
    global _laps
    before, _laps = _laps, defaultdict(float)
    try:
        yield _laps
    finally:
        _laps = before


def with_laps(source: str) -> str:
    """Return the printed stage ``source`` with a lap after each statement of each function. Run it in :func:`timing`.

    Statement i of a function is the i-th call of its graph.
    """
    module = ast.parse(source)
    for item in module.body:
        if isinstance(item, ast.FunctionDef) and item.name not in _NO_STEP:
            item.body = list(_timed(item))
    place = next(index for index, item in enumerate(module.body) if isinstance(item, ast.Import | ast.ImportFrom))
    module.body[place:place] = ast.parse(_HEADER).body
    return ast.unparse(ast.fix_missing_locations(module))


def _timed(function: ast.FunctionDef) -> Iterator[ast.stmt]:
    yield from ast.parse(f"_since = {_NOW}()").body
    index = 0
    for statement in function.body:
        yield statement
        if isinstance(statement, ast.Assign) or (
            isinstance(statement, ast.Expr) and not isinstance(statement.value, ast.Constant)
        ):
            yield from ast.parse(f"_since = {_LAP}({function.name!r}, {index}, _since)").body
            index += 1

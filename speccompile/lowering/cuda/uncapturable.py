"""Search for the node of a step that cannot be captured."""

from __future__ import annotations

import ast
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from speccompile.errors import CannotCapture, error_line
from speccompile.lowering.cuda.device import GraphDevice
from speccompile.lowering.tier import Tier


@dataclass(frozen=True)
class Statement:
    """One line of a printed step, which is one node of its graph.

    ``owner`` is the pass that added it.
    """

    node: str
    owner: str
    line: int
    text: str


def cannot_capture(tier: Tier, error: Exception, device: GraphDevice) -> CannotCapture:
    """Return the error to raise for a tier whose warm-up or capture raised ``error``.

    An op that CUDA refuses raises at once, so the traceback of ``error`` leads to the printed line. An op that only
    invalidates the capture is found by capturing every line separately.
    """
    found = _raised_at(tier, error) or _captured_alone(tier, device)
    if found is None:
        where = "each of its nodes can be captured separately"
    else:
        where = (
            f"it fails at node {found.node!r} of pass {found.owner!r}, line {found.line} of the printed step: "
            f"{found.text}"
        )
    return CannotCapture(tier=tier.name, reason=error_line(error), where=where)


def _raised_at(tier: Tier, error: BaseException) -> Statement | None:
    """Return the innermost line of the printed step in the traceback of ``error``."""
    trace, line = error.__traceback__, None
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == f"<{tier.name}>":
            line = trace.tb_lineno
        trace = trace.tb_next
    return None if line is None else _statement(tier.step.source, line)


@torch.no_grad()
def _captured_alone(tier: Tier, device: GraphDevice) -> Statement | None:
    """Return the first line of ``step`` that cannot be captured, or None. Each line also runs, to provide the values
    of the next lines."""
    source = tier.step.source
    step = next(
        item for item in ast.parse(source).body if isinstance(item, ast.FunctionDef) and item.name == "step"
    )  # fmt: skip
    names = [argument.arg for argument in step.args.args]
    # The function's globals are those of its printed file, with compiled bodies instead of printed ones.
    namespace: dict[str, Any] = {
        **getattr(tier.executable, "__globals__", {}),
        **dict(zip(names, tier.arguments, strict=True)),
    }
    # Graphs are kept: a deleted graph would delete the pool that the next one uses. The allocator of pinned memory
    # keeps the name of an unused pool, and refuses it (torch 2.11).
    graphs = []
    for item in step.body:
        if not isinstance(item, ast.Assign | ast.Expr):
            continue
        code = compile(ast.Module([item], []), f"<{tier.name}>", "exec")
        run = _runs(code, namespace)
        try:
            run()
            with warnings.catch_warnings():
                # torch warns about graphs without a kernel, such as those of views.
                warnings.simplefilter("ignore")
                graphs.append(device.capture(run))
        except Exception:
            # The error's message is that of the whole capture, which the caller reports. Only the line matters here.
            return _statement(source, item.lineno)
    return None


def _runs(code: Any, namespace: dict[str, Any]) -> Callable[[], None]:
    def run() -> None:
        exec(code, namespace)

    return run


def _statement(source: str, line: int) -> Statement:
    lines = source.splitlines()
    text = lines[line - 1].strip()
    owners = [other.strip() for other in lines[:line] if other.startswith("    # ")]
    node, assigned, _ = text.partition(" = ")
    return Statement(
        node if assigned else text.partition("(")[0],
        owners[-1].removeprefix("# ") if owners else "none",
        line,
        text,
    )

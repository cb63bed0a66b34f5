"""``speccompile bench-replay``: drafters over a trace with tokens, without the model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from speccompile.bench.method_names import MethodName
from speccompile.bench.methods import Method, resolve_methods
from speccompile.cli.files import read_text
from speccompile.cli.session import session
from speccompile.errors import InvalidOption
from speccompile.policies import CostTable
from speccompile.traces import Replay, TokenTrace, read_token_trace, replay

_PIPED_WIDTH = 120


def run(
    trace: Path,
    methods: Sequence[MethodName],
    options: dict[str, Any],
    draft_lens: Sequence[int],
    costs: Path | None,
    json_to: Path | None,
) -> None:
    """See ``speccompile bench-replay --help``."""
    with session():
        sys.path.insert(0, os.getcwd())
        resolved = resolve_methods(methods, options)
        recorded = read_token_trace(trace)
        table = recorded.costs if costs is None else _costs(costs)
        found = [
            (method.name, draft_len, _replayed(recorded, method, draft_len, table, given=costs is not None))
            for method in resolved
            for draft_len in draft_lens
        ]
        Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH).print(_table(trace.name, recorded, found))
        if any(replayed.milliseconds is None for *_, replayed in found):
            typer.echo("no speed without costs of the tiers: give --costs, or record with a policy that times them")
        if json_to is not None:
            rows = [{"method": name, "draft_len": k, **_figures(replayed)} for name, k, replayed in found]
            json_to.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _replayed(trace: TokenTrace, method: Method, draft_len: int, costs: CostTable | None, *, given: bool) -> Replay:
    # Costs of the trace may be of other tiers. Requested costs must have the tiers.
    if not given and costs is not None and not {0, draft_len} <= set(costs.draft_lens):
        costs = None
    return replay(trace, method.mode, draft_len=draft_len, costs=costs, **method.options)


def _costs(path: Path) -> CostTable:
    """The costs in a file: a table as JSON, or a trace.

    Raises:
        InvalidOption: the file has none.
    """
    text = read_text("--costs", path)
    try:
        # The first line of a trace has its costs.
        first, _, rest = text.partition("\n")
        data = json.loads(first if rest.startswith("{") else text)
        return CostTable.from_json(data.get("costs", data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"it has no costs of tiers ({type(error).__name__}: {error}); give the JSON of CostTable, or a trace"
        raise InvalidOption(where="the command line", name="--costs", value=str(path), reason=reason) from error


def _figures(replayed: Replay) -> dict[str, Any]:
    return {
        "steps": replayed.steps,
        "tokens": replayed.tokens,
        "acceptance_length": replayed.acceptance_length,
        "tokens_per_second": replayed.tokens_per_second,
        "requests": [asdict(request) for request in replayed.requests],
    }


def _table(name: str, trace: TokenTrace, found: Sequence[tuple[str, int, Replay]]) -> Table:
    tokens, steps = len(trace.tokens["token"]), len(trace.steps["tier"])
    title = f"{name}: {len(trace.requests)} requests, {tokens} tokens in {steps} steps"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("", no_wrap=True)
    for heading in ("K", "steps", "acceptance length", "tokens/s by the costs"):
        table.add_column(heading, justify="right")
    for method, draft_len, replayed in found:
        speed = replayed.tokens_per_second
        shown = "-" if speed is None else f"{speed:.1f}"
        table.add_row(method, str(draft_len), str(replayed.steps), f"{replayed.acceptance_length:.2f}", shown)
    return table

"""The figures as tables, against what they are to reach."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from benchmarks.gpu.budget import Figures
from benchmarks.gpu.phases import PHASES


def tables(measured: Mapping[str, Figures]) -> list[Table]:
    """One for each part that has figures, and last what was not measured."""
    makers = {
        "steps": _steps,
        "outside the target": _shares,
        "swaps": _facts,
        "memory": _facts,
        "loops": _loops,
        "phases": _phases,
        "copy bandwidth": _facts,
        "wrap": _facts,
        "texts": _texts,
        "kernels": _kernels,
        "engine": _engine,
        "linears": _linears,
    }
    found = []
    for name, figures in measured.items():
        maker = makers[name.partition(": ")[2] or name]
        table = maker(name, figures)
        if table.row_count:
            found.append(table)
    missing = _table("not measured", "part", "why")
    for name, figures in measured.items():
        if "not measured" in figures:
            missing.add_row(name, str(figures["not measured"]))
    return [*found, missing] if missing.row_count else found


def _steps(name: str, figures: Figures) -> Table:
    table = _table(name, "rows", "K", "ms", "floor ms", "of the floor's speed", "to K=0")
    for case in figures.get("cases", []):
        speed = f"{100 / case['over_floor']:.1f} %"
        table.add_row(
            str(case["rows"]),
            str(case["K"]),
            f"{case['milliseconds']:.3f}",
            f"{case['floor_milliseconds']:.3f}",
            speed,
            f"{case['to_plain']:.3f}x",
        )
    return table


def _shares(name: str, figures: Figures) -> Table:
    table = _table(name, "rows", "K", "step ms", "target alone ms", "outside target and drafter")
    for case in figures.get("cases", []):
        times = (f"{case['milliseconds']:.3f}", f"{case['target_milliseconds']:.3f}")
        table.add_row(str(case["rows"]), str(case["K"]), *times, f"{100 * case['outside']:.1f} %")
    return table


def _texts(name: str, figures: Figures) -> Table:
    table = _table(name, "tier", "its steps", "tokens", "compared with", "equal", "first difference", "logit change")
    for case in figures.get("cases", []):
        first, change = (case.get(key) for key in ("first_difference", "logit_change"))
        table.add_row(
            case["tier"],
            str(case["steps"]),
            case["tokens"],
            case["reference"],
            case["equal"],
            "-" if first is None else str(first),
            "-" if not change else f"{change:.3g}",
        )
    return table


def _kernels(name: str, figures: Figures) -> Table:
    table = _table(f"{name}: launches and microseconds of a step", "K", "kernel", "launches", "us", "us each")
    for case in figures.get("cases", []):
        table.add_row(str(case["K"]), "all", f"{case['launches']:.0f}", f"{case['microseconds']:.0f}", "")
        for row in case["kernels"]:
            each = f"{row['microseconds'] / row['launches']:.1f}"
            table.add_row("", row["kernel"][:70], f"{row['launches']:.0f}", f"{row['microseconds']:.0f}", each)
    return table


def _linears(name: str, figures: Figures) -> Table:
    table = _table(name, "product", "kernel", "rows", "us", "of the copy bandwidth")
    for case in figures.get("cases", []):
        times = (f"{case['microseconds']:.1f}", f"{100 * case['share']:.0f} %")
        table.add_row(case["product"], case["kernel"], str(case["rows"]), *times)
    return table


def _engine(name: str, figures: Figures) -> Table:
    table = _table(name, "K", "request", "steps with K", "ms a step", "tier alone ms", "tokens/s", "acceptance length")
    for case in figures.get("cases", []):
        times = (f"{case['milliseconds']:.3f}", f"{case['tier_milliseconds']:.3f}")
        rates = (f"{case['tokens_per_second']:.1f}", f"{case['acceptance_length']:.2f}")
        share = f"{100 * case['share_of_steps']:.0f} %"
        table.add_row(str(case["K"]), case["request"], share, *times, *rates)
    return table


def _loops(name: str, figures: Figures) -> Table:
    table = _table(f"{name}, {figures.get('rows', 0)} rows", "loop", "ms a token and row", "warm-up s")
    for row in figures.get("loops", []):
        warm_up = figures["warm_up_seconds"][row["loop"]]
        table.add_row(row["loop"], f"{row['milliseconds_per_token']:.3f}", f"{warm_up:.1f}")
    return table


def _phases(name: str, figures: Figures) -> Table:
    phases = [phase for phase, _ in PHASES]
    table = _table(f"{name}: seconds for the same tokens", "policy", *phases, "all")
    for run in figures.get("runs", []):
        table.add_row(run["policy"], *[f"{run[phase]:.2f}" for phase in phases], f"{run['all']:.2f}")
    if "adaptive_to_best_fixed" in figures:
        table.add_row(
            "adaptive, to the best fixed tier", *[""] * len(phases), f"{figures['adaptive_to_best_fixed']:.3f}x"
        )
    return table


def _facts(name: str, figures: Figures) -> Table:
    table = _table(name, "", "value")
    for key, value in figures.items():
        if key not in ("not measured", "failed", "seconds"):
            table.add_row(key.replace("_", " "), _number(value))
    return table


def _number(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3g}" if abs(value) < 1e6 else f"{value:,.0f}"
    if isinstance(value, dict):
        return ", ".join(f"{key} {_number(item)}" for key, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.MARKDOWN)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index and heading not in ("why", "value") else "left")
    return table

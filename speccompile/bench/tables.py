"""Tables of a summary for the terminal, and its figures as CSV."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from speccompile.bench.bootstrap import Interval
from speccompile.bench.figures import Figures
from speccompile.bench.method_names import PLAIN
from speccompile.bench.summary import BenchSummary, LineSummary, MachineSummary

#: Name of the group of all prompts in the CSV file.
ALL_PROMPTS = "all"
#: Columns of the CSV file after machine, line and category.
_COLUMNS = (
    "prompts",
    "answers",
    "tokens",
    "steps",
    "tokens_per_second",
    "first_token_ms",
    "acceptance_length",
    "acceptance_length_low",
    "acceptance_length_high",
    "speed_over_k0",
    "speed_over_k0_low",
    "speed_over_k0_high",
    "step_ms",
    "step_cost",
)


def tables_of(summary: BenchSummary) -> Iterator[Table]:
    """Tables for the terminal: the lines, then acceptance by position, then figures by category."""
    for machine in summary.machines:
        yield _lines(machine, summary)
        drafting = [line for line in machine.lines if line.positions]
        if drafting:
            yield _positions(drafting)
        if any(line.categories for line in machine.lines):
            yield _categories(machine.lines, "acceptance length", lambda figures: _value(figures.acceptance_length))
            yield _categories(machine.lines, "speed over K=0", lambda figures: _value(figures.speed, "x"))


def write_csv(path: Path, summary: BenchSummary) -> None:
    """Write a row for each machine, line and category.

    Raises:
        OSError: the file cannot be written.
    """
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["machine", "line", "category", *_COLUMNS])
        for machine in summary.machines:
            for line in machine.lines:
                for category, figures in ((ALL_PROMPTS, line.figures), *line.categories.items()):
                    writer.writerow([machine.name, line.name, category, *_row(figures)])


def _row(figures: Figures) -> list[float | str]:
    values: list[float | None] = [figures.prompts, figures.answers, figures.tokens, figures.steps]
    values += [figures.tokens_per_second, figures.first_token_ms]
    for each in (figures.acceptance_length, figures.speed):
        values += [None, None, None] if each is None else [each.value, each.low, each.high]
    values += [figures.step_ms, figures.step_cost]
    return ["" if value is None else round(value, 6) for value in values]


def _table(title: str, headings: Sequence[str], caption: str | None = None) -> Table:
    table = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    table.padding = (0, 1, 0, 0)
    table.add_column("", no_wrap=True)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _lines(machine: MachineSummary, summary: BenchSummary) -> Table:
    prompts = max(line.figures.prompts for line in machine.lines)
    title = f"{summary.settings['model']} on {machine.name}: {prompts} prompts"
    caption = "[] is the 95 % interval over prompts; speed over K=0 is acceptance length / step cost"
    if machine.kernels is not None:
        caption += f"; K=0 over transformers: {_value(machine.kernels, 'x')} {_ends(machine.kernels)}"
    headings = ("tokens/s", "speed\nover K=0", "", "acceptance\nlength", "", "step\ncost", "texts\nequal")
    table = _table(title, headings, caption)
    for line in machine.lines:
        own = line.figures
        table.add_row(
            line.name,
            f"{own.tokens_per_second:.1f}",
            _value(own.speed, "x"),
            "" if line.name == PLAIN else _ends(own.speed),
            _value(own.acceptance_length),
            "" if line.name == PLAIN else _ends(own.acceptance_length),
            "-" if own.step_cost is None else f"{own.step_cost:.2f}",
            _same(line),
        )
    return table


def _same(line: LineSummary) -> str:
    if line.agreement is None:
        return "-"
    differ = "" if line.same == line.compared else f", {100 * line.agreement:.0f} %"
    return f"{line.same} of {line.compared}{differ}"


def _positions(lines: Sequence[LineSummary]) -> Table:
    deepest = max(len(line.positions) for line in lines)
    table = _table("accepted, of the drafts whose predecessors were accepted", [str(i + 1) for i in range(deepest)])
    for line in lines:
        shares = [f"{100 * each.accepted / each.reached:.0f} %" for each in line.positions]
        table.add_row(line.name, *shares)
    return table


def _categories(lines: Sequence[LineSummary], title: str, show: Callable[[Figures], str]) -> Table:
    names = list(dict.fromkeys(name for line in lines for name in line.categories))
    table = _table(title, names)
    for line in lines:
        cells = [show(line.categories[name]) if name in line.categories else "-" for name in names]
        table.add_row(line.name, *cells)
    return table


def _value(value: Interval | None, unit: str = "") -> str:
    return "-" if value is None else f"{value.value:.2f}{unit}"


def _ends(value: Interval | None) -> str:
    return "" if value is None or value.low is None or value.high is None else f"[{value.low:.2f}, {value.high:.2f}]"

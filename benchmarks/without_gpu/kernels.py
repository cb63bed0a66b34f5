"""``python -m benchmarks.without_gpu.kernels``: every Triton kernel compiled for an H100, and what it takes there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import triton
import typer

from benchmarks.without_gpu.compiled import Compiled, compile_launch
from benchmarks.without_gpu.kernel_cases import Case, cases

PAGE = Path(__file__).parents[2] / "docs" / "architecture" / "cuda_kernels.md"
HEADER = ("kernel", "shape", "warps", "registers", "stack", "shared")
MARK = "\n<!-- written by python -m benchmarks.without_gpu.kernels --write -->\n"


def labels(all_cases: Iterable[Case]) -> dict[tuple[str, str], str]:
    """Names of cases in the table, by op and shape: the shape, with the op where several have it."""
    pairs = [(case.op, case.shape) for case in all_cases]
    counts = Counter(shape for _, shape in pairs)
    return {(op, shape): shape if counts[shape] == 1 else f"{op} {shape}" for op, shape in pairs}


def compiled(case: Case) -> list[Compiled]:
    """The kernels of a case."""
    return [compile_launch(launch) for launch in case.launches()]


def figures(kernel: Compiled) -> tuple[str, ...]:
    """Warps, registers, stack and shared memory as the table has them."""
    return str(kernel.warps), str(kernel.registers), str(kernel.stack), f"{kernel.shared:,}"


def line(shape: str, kernel: Compiled) -> str:
    """A line of the table; ``shape`` may be several."""
    return f"| {' | '.join((kernel.name, shape, *figures(kernel)))} |"


def read_figures(page: str) -> dict[tuple[str, str], set[tuple[str, ...]]]:
    """The figures of the page's table, by kernel and label: a case may start a kernel in several forms."""
    found: dict[tuple[str, str], set[tuple[str, ...]]] = {}
    for text in page.partition(MARK)[2].splitlines():
        cells = [cell.strip() for cell in text.strip("| \n").split(" | ")]
        if len(cells) == len(HEADER):
            for label in cells[1].split("; "):
                found.setdefault((cells[0], label), set()).add(tuple(cells[2:]))
    return found


def version_line() -> str:
    """The line of the page that names the compiler."""
    return f"Triton {triton.__version__}."


def table(found: Iterable[tuple[str, Compiled]]) -> list[str]:
    """Shapes and their kernels as lines, one for all shapes of a kernel that take the same."""
    shapes: dict[tuple[object, ...], dict[str, Compiled]] = {}
    for shape, kernel in found:
        figures = (kernel.name, kernel.warps, kernel.registers, kernel.stack, kernel.shared)
        shapes.setdefault(figures, {})[shape] = kernel
    names = list(dict.fromkeys(str(name) for name, *_ in shapes))
    ordered = sorted(shapes.items(), key=lambda item: names.index(str(item[0][0])))
    lines = [line("; ".join(same), next(iter(same.values()))) for _, same in ordered]
    return [f"| {' | '.join(HEADER)} |", f"|{'---|' * len(HEADER)}", *lines]


def main(
    only: Annotated[str, typer.Option(help="Leave out cases whose names do not contain this.")] = "",
    write: Annotated[bool, typer.Option("--write", help=f"Put the table of all cases into {PAGE.name}.")] = False,
) -> None:
    """Compile all kernels for sm_90, without a GPU. Exits with 1 if one spills or takes too much shared memory."""
    if write and only:
        raise typer.BadParameter("--write writes all cases: leave out --only")
    found = []
    known = labels(cases())
    for case in cases():
        if only.lower() not in f"{case.op} {case.shape}".lower():
            continue
        for kernel in compiled(case):
            found.append((known[case.op, case.shape], kernel))
            typer.echo(line(known[case.op, case.shape], kernel))
    wrong = [line(shape, kernel) for shape, kernel in found if not kernel.fits]
    for text in wrong:
        typer.echo(f"does not fit: {text}", err=True)
    if write:
        head, mark, _ = PAGE.read_text().partition(MARK)
        PAGE.write_text(head + mark + "\n".join(["", version_line(), "", *table(found), ""]))
    if wrong:
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

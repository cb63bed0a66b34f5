"""``python -m benchmarks.when_it_pays``: the plot of docs/when-it-pays.md, of what ``benchmarks.drafters`` measured."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "benchmarks" / "results" / "cpu-amd-epyc-2-cores-drafters.json"
#: Variants of the benchmark, their names in the plot, and their marks.
VARIANTS = {"ngram": ("ngram", "o"), "head": ("EAGLE-3 head", "s"), "suffix+head": ("suffix, else the head", "^")}
#: Background, ink, grid, and one colour for each variant: Okabe and Ito's, lighter on dark.
COLOURS = {
    "light": ("#ffffff", "#1f2328", "#d0d7de", ("#0072b2", "#d55e00", "#009e73")),
    "dark": ("#1a1c1e", "#e6edf3", "#3d444d", ("#56b4e9", "#ff9e5e", "#3ddbb0")),
}


@dataclass(frozen=True)
class Point:
    """One drafter on the prompts of one category: its acceptance length, and its tokens/s over those of K=0."""

    variant: str
    category: str
    acceptance_length: float
    speed: float

    @property
    def step_cost(self) -> float:
        """How long its step took, in steps of K=0: what an acceptance length is worth nothing below."""
        return self.acceptance_length / self.speed


def points(file: Path = FIGURES) -> list[Point]:
    """Of each category of prompts; sums over categories are left out."""
    categories = [
        row for row in json.loads(file.read_text())["categories"] if not row["category"].startswith(("all", "those"))
    ]
    return [
        Point(variant, row["category"], row["acceptance_length"][variant], row["ratios"]["none"][variant])
        for row in categories
        for variant in VARIANTS
    ]


def break_even(found: Sequence[Point], variant: str) -> float:
    """The median cost of a drafter's step, in steps of K=0: from this acceptance length on it pays."""
    return median(point.step_cost for point in found if point.variant == variant)


def draw(found: Sequence[Point], theme: str, path: Path) -> None:
    """Write the plot as SVG, the same bytes for the same figures."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    background, ink, grid, colours = COLOURS[theme]
    style = {
        "svg.fonttype": "none",
        "svg.hashsalt": "when-it-pays",
        "font.family": "sans-serif",
        "font.size": 11,
        "text.color": ink,
        **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), ink),
        **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), background),
    }
    with matplotlib.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(8, 4.6))
        right, top = 2.75, 2.6
        axes.axhline(1, color=ink, linewidth=1)
        axes.annotate("no speculation (K=0)", (right, 1), (-2, -13), textcoords="offset points", ha="right")
        axes.axhspan(0.7, 1, color=grid, alpha=0.35, linewidth=0)
        for colour, (variant, (label, mark)) in zip(colours, VARIANTS.items(), strict=True):
            own = [point for point in found if point.variant == variant]
            cost = break_even(found, variant)
            axes.plot((cost * 0.7, right), (0.7, right / cost), color=colour, linewidth=1, linestyle="--")
            axes.scatter(
                [point.acceptance_length for point in own],
                [point.speed for point in own],
                color=colour,
                marker=mark,
                s=34,
                zorder=3,
                label=f"{label}: a step costs {cost:.2f}",
            )
        axes.set(xlim=(1, right), ylim=(0.7, top), xlabel="acceptance length (tokens a step)")
        axes.set_ylabel("tokens/s, relative to K=0")
        axes.grid(color=grid, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, loc="upper left")
        figure.tight_layout()
        figure.savefig(path, format="svg", metadata={"Date": None})
        pyplot.close(figure)


def main(output: Annotated[Path, typer.Option(help="The folder of both files.")] = ROOT / "docs") -> None:
    """Draw the plot in light and in dark colours."""
    found = points()
    for theme in COLOURS:
        draw(found, theme, output / f"when-it-pays-{theme}.svg")
    for variant, (label, _) in VARIANTS.items():
        own = [point for point in found if point.variant == variant]
        pays = sum(point.speed > 1 for point in own)
        typer.echo(f"{label}: a step costs {break_even(found, variant):.2f}; faster in {pays} of {len(own)} categories")


if __name__ == "__main__":
    typer.run(main)

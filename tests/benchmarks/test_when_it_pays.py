"""The plot of docs/when-it-pays.md shows the figures that are stored."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import when_it_pays

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("theme", when_it_pays.COLOURS)
def test_the_committed_plot_is_that_of_the_figures(theme: str, tmp_path: Path) -> None:
    when_it_pays.draw(when_it_pays.points(), theme, tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text() == (DOCS / f"when-it-pays-{theme}.svg").read_text(), (
        "python -m benchmarks.when_it_pays"
    )


def test_a_drafter_breaks_even_at_the_cost_of_its_step() -> None:
    point = when_it_pays.Point("head", "qa", acceptance_length=1.5, speed=1.2)
    assert point.step_cost == pytest.approx(1.25)
    assert when_it_pays.break_even([point], "head") == pytest.approx(1.25)


def test_sums_over_categories_are_no_points() -> None:
    found = when_it_pays.points()
    assert len(found) == 13 * len(when_it_pays.VARIANTS)
    assert all(1 <= point.acceptance_length <= 4 for point in found)

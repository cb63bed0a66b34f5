"""Medians of rounds, and intervals of the ratio to the best single drafter."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.drafter_rounds import keeps_up, median_runs
from speccompile.cli.measure import Run


def run(seconds: float) -> Run:
    """It emits its first token after a second."""
    return Run([1, 2, 3], 1.0, 1.0 + seconds, 1, 2)


def test_the_median_run_of_each_prompt() -> None:
    rounds = [{"none": [run(3.0), run(1.0)]}, {"none": [run(1.0), run(5.0)]}, {"none": [run(2.0), run(4.0)]}]
    assert median_runs(rounds) == {"none": [run(2.0), run(4.0)]}


@pytest.mark.parametrize(("share", "enough"), [(0.8, True), (1.0, True), (1.01, True), (1.2, False)])
def test_a_way_that_takes_this_share_of_the_best_time(share: float, enough: bool) -> None:
    """With noise of 1 % over five prompts and rounds. The best of the others is chosen by its medians."""
    draw = np.random.default_rng(1)

    def runs(time: float) -> list[Run]:
        return [run(float(length * time * draw.normal(1, 0.01))) for length in (1, 2, 1, 3, 1)]

    rounds = [{"slow": runs(2.0), "best": runs(1.0), "composed": runs(share)} for _ in range(5)]
    found = keeps_up(rounds, "composed", ["slow", "best"], range(5))
    assert found.best == "best" and found.enough == enough
    assert found.low < found.ratio < found.high and found.ratio == pytest.approx(1 / share, abs=0.02)
    assert found.high - found.low < 0.06


def test_few_prompts_that_differ_have_a_wide_interval() -> None:
    rounds = [{"best": [run(1.0), run(1.0)], "composed": [run(0.5), run(2.0)]} for _ in range(3)]
    found = keeps_up(rounds, "composed", ["best"], range(2))
    assert (found.low, found.high) == (0.5, 2.0)

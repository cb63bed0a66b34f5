"""The benchmark of steps beside other work: what is measured, and the table of it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from benchmarks import neighbours

TAKEN = {
    "nothing": {"K=0": [0.010, 0.012, 0.011], "prompt of 512": [0.2, 0.4]},
    "one busy loop": {"K=0": [0.020, 0.022, 0.099], "prompt of 512": [0.25, 0.25]},
}


def test_the_table_has_median_and_mean_of_each_work_beside_each_neighbour() -> None:
    report = neighbours._report(TAKEN)
    assert report["milliseconds"]["one busy loop"]["K=0"] == pytest.approx({"median": 22.0, "mean": 47.0})
    shown = io.StringIO()
    Console(file=shown, width=100).print(neighbours._table(report))
    lines = [line for line in shown.getvalue().splitlines() if "│" in line]
    assert [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines] == [
        ["nothing", "11.0 (11.0)", "300.0 (300.0)"],
        ["one busy loop", "22.0 (47.0)", "250.0 (250.0)"],
    ]


def test_long_work_runs_less_often_and_the_first_of_a_run_is_not_taken() -> None:
    runs: dict[str, list[float]] = {"step": [], "prompt": []}

    def work(name: str) -> Any:
        def run() -> float:
            runs[name].append(len(runs[name]))
            return runs[name][-1]

        return run

    taken = neighbours._in_turns({"step": (work("step"), 1), "prompt": (work("prompt"), 20)}, 20)
    assert taken["step"] == [*map(float, range(1, 11)), *map(float, range(12, 22))]
    assert taken["prompt"] == [1.0, 3.0]

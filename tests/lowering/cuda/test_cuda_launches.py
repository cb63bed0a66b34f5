"""The launches of a step on CUDA are those of the committed table."""

from __future__ import annotations

from typing import Any

import pytest
import typer

from benchmarks.without_gpu.counting import VARIANTS, Launches, count
from benchmarks.without_gpu.launches import HEADER, PAGE, main, read_rows, row_of, with_rows
from benchmarks.without_gpu.models import MODELS
from speccompile.lowering.kernel_list import KernelCall, launches

SMALLEST = MODELS[0]


def test_no_step_starts_more_kernels_than_the_table_says() -> None:
    """If this is by intention, write the new table: ``python -m benchmarks.without_gpu.launches --write``."""
    found = row_of(SMALLEST.name, count(SMALLEST))
    assert found == read_rows(PAGE.read_text())[SMALLEST.name]


def test_the_table_has_all_models() -> None:
    rows = read_rows(PAGE.read_text())
    assert list(rows) == [model.name for model in MODELS]
    assert [row["layers"] for row in rows.values()] == [str(model.layers) for model in MODELS]


def test_a_step_of_llama_starts_ten_kernels_beside_its_layers_and_lm_head() -> None:
    row = read_rows(PAGE.read_text())["Llama-3.1-8B"]
    at_zero = int(row["greedy"].partition(" / ")[0])
    assert at_zero - int(row["layers"]) * float(row["a layer"]) == 10 + 1


def test_lines_of_other_models_stay() -> None:
    counts: dict[str, Any] = {variant.name: "refused" for variant in VARIANTS}
    counts |= {"greedy": {0: Launches(47, 30, 15.5), 7: Launches(60, 30, 15.5)}, "drawn": {}}
    page, row = PAGE.read_text(), row_of(SMALLEST.name, counts)
    assert [row[name] for name in HEADER[1:6]] == ["30", "15.5", "512 / 525", "none", "none"]
    written = with_rows(page, {SMALLEST.name: row})
    assert read_rows(written) == read_rows(page) | {SMALLEST.name: row}
    assert written.splitlines()[0] == page.splitlines()[0] and with_rows(written, read_rows(page)) == page


def test_a_body_counts_for_each_of_its_calls() -> None:
    calls = (
        KernelCall("drafter", "head", "body", 3),
        KernelCall("step", "layer", "body", 2),
        KernelCall("step", "aten.add", "stock", 4),
        KernelCall("step", "speccompile.mine", "plain", 1),
        KernelCall("head", "mm", "stock", 10),
        KernelCall("layer", "triton_0", "inductor", 100),
    )
    assert launches(calls) == 4 + 3 * 10 + 2 * 100


def test_other_figures_than_those_of_the_table_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {variant.name: {0: Launches(47, 30, 15.5), 7: Launches(60, 30, 15.5)} for variant in VARIANTS}
    monkeypatch.setattr("benchmarks.without_gpu.launches.count", lambda model: found)
    main(only=SMALLEST.name)
    with pytest.raises(typer.Exit):
        main(only=SMALLEST.name, check=True)

"""A linear over rounded weights adds in the same order at every number of rows, as compiled for sm_90."""

from __future__ import annotations

import re

import pytest

from benchmarks.without_gpu.compiled import triton_target
from benchmarks.without_gpu.kernel_launches import rounded
from speccompile.ops.triton.launch import Launch


def layouts_of_sums(launch: Launch) -> list[str]:
    """The tensors that the kernel reduces along their first axis, with the threads that hold their values."""
    with triton_target():
        kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#\w+) = (.*)$", text, re.MULTILINE))
    sums = re.findall(r'"tt\.reduce"\(%\S+\) <\{axis = 0 .*?\}\) : \((tensor<[^>]*>)\)', text, re.DOTALL)
    return [re.sub(r"#\w+", lambda name: layouts[name.group()], sum_) for sum_ in sums]


@pytest.mark.parametrize("depth", [576, 14336])
@pytest.mark.parametrize("form", ["int8", "int4"])
def test_sums_have_one_layout_at_every_number_of_rows(form: str, depth: int) -> None:
    one, *others = (layouts_of_sums(rounded(form, rows, depth=depth, features=576)[1]) for rows in (1, 3, 8))
    assert len(one) == (2 if form == "int4" else 1) and "warpsPerCTA" in one[0]
    assert all(other == one for other in others)

"""Numbers that a tier knows, as ops of its step."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from speccompile.ops.numbers import SINGLE_VALUES, numbers

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "values",
    [
        [7],
        [0] * 40,
        [-1, *range(62)],
        list(range(SINGLE_VALUES)),
        list(range(SINGLE_VALUES + 1)),
        [0, 2**40, 5] * 10,
        [2**62, 0, 1] * 5,
    ],
)
def test_numbers_are_the_given_values(values: list[int]) -> None:
    found = numbers(values, CPU)
    assert found.dtype == torch.int64 and found.tolist() == values


def test_the_nodes_of_a_large_tree_take_few_ops() -> None:
    graph = make_fx(lambda: numbers(range(64), CPU))()
    assert len(list(graph.graph.nodes)) < 20

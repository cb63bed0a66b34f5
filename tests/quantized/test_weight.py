"""Quantised weights as data: what is refused, and the values that they stand for."""

from __future__ import annotations

import re
from typing import Any

import gguf
import pytest
import torch

from speccompile.errors import InvalidOption
from speccompile.quantized import GroupedWeight, QuantizedWeights
from support.errors import raises


def fields(**changes: Any) -> dict[str, Any]:
    return {
        "values": torch.zeros((6, 64), dtype=torch.int8),
        "bits": 8,
        "scales": torch.ones(6, 2),
        "minimums": torch.ones(6, 2),
        "group": 32,
        "order": torch.arange(64),
    } | changes


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("values", torch.zeros((6, 64)), "must be int8 [N, K] on the CPU"),
        ("values", torch.zeros((6, 64), dtype=torch.int8, device="meta"), "on the CPU"),
        ("values", torch.zeros((0, 64), dtype=torch.int8), "must be int8"),
        ("bits", 5, "choose from 4, 6, 8"),
        ("group", 48, "K is 64; choose a divisor from 16, 32, 64, 128, or K"),
        ("group", 128, "K is 64"),
        ("group", 16, None),
        ("scales", torch.ones(6, 3), "must be float32 [6, 2] on the CPU, and finite"),
        ("scales", torch.ones(6, 2).half(), "must be float32"),
        ("scales", None, "must be float32"),
        ("scales", torch.full((6, 2), torch.nan), "finite"),
        ("minimums", torch.full((6, 2), torch.inf), "finite"),
        ("minimums", torch.ones(2, 6), "must be float32 [6, 2]"),
        ("order", torch.arange(63), "permutation of 0 to 63"),
        ("order", torch.zeros(64, dtype=torch.int64), "permutation"),
        ("order", torch.arange(64).int(), "int64"),
    ],
)
def test_what_does_not_fit_is_refused(name: str, value: Any, says: str | None) -> None:
    GroupedWeight(**fields())
    # Scales are of another group then.
    with raises(InvalidOption, name=name if says else "scales", reason=re.compile(re.escape(says or "[6, 4]"))):
        GroupedWeight(**fields(**{name: value}))


@pytest.mark.parametrize(("bits", "numbers"), [(4, [-9]), (4, [16]), (4, [-1, 8]), (6, [32]), (6, [-33])])
def test_values_beyond_their_bits_are_refused(bits: int, numbers: list[int]) -> None:
    values = torch.zeros((6, 64), dtype=torch.int8)
    values[0, : len(numbers)] = torch.tensor(numbers, dtype=torch.int8)
    with raises(InvalidOption, name="values", reason=re.compile(f"values of {bits} bits must")):
        GroupedWeight(**fields(values=values, bits=bits))


def test_a_column_is_multiplied_with_the_input_that_order_names() -> None:
    values = torch.arange(128, dtype=torch.int8).reshape(2, 64)
    order = torch.randperm(64)
    weight = GroupedWeight(values, 8, torch.full((2, 2), 0.5), torch.full((2, 2), 3.0), 32, order)
    dequantized = weight.dequantize()
    for column, place in enumerate(order.tolist()):
        assert torch.equal(dequantized[:, place], values[:, column] * 0.5 - 3)
    assert weight.nbytes == 128 + 2 * 4 * 4 + 64 * 8 and weight.shape == (2, 64)


def test_dequantised_weights_have_the_bits_of_ggufs() -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    data = gguf.quants.quantize(torch.randn(5, 96).numpy(), kind)
    blocks = torch.from_numpy(data).view(5, 3, 34)
    scales = blocks[..., :2].contiguous().view(torch.float16)[..., 0].float()
    weight = GroupedWeight(blocks[..., 2:].contiguous().view(torch.int8).flatten(1), 8, scales, None, 32)
    assert torch.equal(weight.dequantize(), torch.from_numpy(gguf.quants.dequantize(data, kind)))


def test_weights_are_read_when_they_are_looked_up() -> None:
    class Read(dict[str, GroupedWeight]):
        looked_up = 0

        def __getitem__(self, name: str) -> GroupedWeight:
            self.looked_up += 1
            return super().__getitem__(name)

    read = Read(one=GroupedWeight(**fields()), other=GroupedWeight(**fields()))
    weights = QuantizedWeights(read, "a format")
    assert (
        list(weights) == ["one", "other"] and len(weights) == 2 and repr(weights) == "<2 quantised weights, a format>"
    )
    assert read.looked_up == 0 and weights["one"] is read["one"]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("format", ({"one": None}, "")),
        ("weights", ({}, "a format")),
        ("weights", (None, "a format")),
        ("others", ({"one": None}, "a format", "int3")),
        ("others", ({"one": None}, "a format", QuantizedWeights({"one": GroupedWeight(**fields())}, "a format"))),
    ],
)
def test_arguments_of_quantised_weights_are_checked(name: str, arguments: tuple[Any, ...]) -> None:
    with raises(InvalidOption, where="QuantizedWeights", name=name):
        QuantizedWeights(*arguments)

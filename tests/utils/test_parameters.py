"""Owners of parameters, tied ones too."""

from __future__ import annotations

from torch import nn

from speccompile.utils.parameters import owners_by_parameter, put_parameter


def test_a_tied_parameter_is_replaced_in_all_modules_and_under_all_names() -> None:
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    second.weight = first.weight
    first.register_parameter("again", first.weight)
    owners = owners_by_parameter(nn.ModuleList((first, second)))
    assert owners[id(first.bias)] == [(first, "bias")]
    assert owners[id(first.weight)] == [(first, "weight"), (first, "again"), (second, "weight")]
    new = nn.Parameter(first.weight.detach().clone())
    put_parameter(owners[id(first.weight)], new)
    assert first.weight is first.again is second.weight is new

"""The search of int4 scales loses no more than the nearest numbers do, counted by the size of the inputs."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.forms.int4 import quantise_int4, search_int4


def values_of(numbers: torch.Tensor, scales: torch.Tensor, depth: int) -> torch.Tensor:
    return (numbers * scales.float()[..., None]).flatten(1)[:, :depth]


@settings(max_examples=40)
@given(
    st.sampled_from([1, 3, 65]),
    st.sampled_from([1, 31, 64, 200]),
    st.sampled_from([1e-12, 0.02, 1.0, 1e7]),
    st.sampled_from(["even", "uneven", "zeros", "none"]),
    st.integers(0, 99),
)
def test_no_group_loses_more(features: int, depth: int, size: float, inputs: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(features, depth, generator=generator) * size
    importance = torch.ones(depth)
    if inputs == "uneven":
        importance = torch.exp(4 * torch.randn(depth, generator=generator))
    elif inputs == "zeros":
        importance = torch.rand(depth, generator=generator).round()
    elif inputs == "none":
        importance = torch.zeros(depth)
    nearest, searched = quantise_int4(weight), search_int4(weight, importance)
    assert [part.dtype for part in searched] == [part.dtype for part in nearest]
    assert [part.shape for part in searched] == [part.shape for part in nearest]
    assert searched[0].min() >= -8 and searched[0].max() <= 7 and searched[1].isfinite().all()
    costs = importance.clamp_min(1e-6 * float(importance.mean())).double()
    lost = [
        ((values_of(*parts, depth) - weight).double().square() * costs).split(32, dim=1)
        for parts in (nearest, searched)
    ]
    for before, after in zip(*lost, strict=True):
        assert (after.sum(1) <= before.sum(1) * (1 + 1e-5)).all()


def test_large_inputs_count_most() -> None:
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    importance = torch.ones(96)
    importance[::32] = 1000
    nearest, searched = (
        values_of(*parts, 96) - weight for parts in (quantise_int4(weight), search_int4(weight, importance))
    )
    assert searched[:, ::32].square().mean() < 0.2 * nearest[:, ::32].square().mean()


def test_what_int4_can_hold_is_held() -> None:
    """Also where the greatest number of a group is not -8."""
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randint(-6, 8, (40, 6, 32), generator=generator)
    numbers[..., 0] = 7
    weight = (numbers * 0.25).flatten(1)
    found = search_int4(weight, torch.ones(192))
    assert torch.equal(values_of(*found, 192), weight)


def test_weights_that_are_no_numbers_are_not_searched() -> None:
    weight = torch.full((2, 64), torch.nan)
    numbers, scales = search_int4(weight, torch.ones(64))
    assert not torch.isfinite(scales).all() or (numbers == 0).all()

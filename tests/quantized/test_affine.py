"""``scale * (value - zero)`` as a GroupedWeight: the same bits, in the fewest bits of storage that keep them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.errors import DamagedCheckpoint, UnsupportedCheckpoint
from speccompile.quantized.affine import affine_weight
from speccompile.quantized.source import TensorSource
from support.errors import raises

SOURCE = TensorSource("checkpoint", "linear")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.sampled_from((2, 3, 4, 8)),
    group=st.sampled_from((16, 32, 128, 256, 512)),
    dtype=st.sampled_from(DTYPES),
    kind=st.sampled_from(("none", "equal", "each")),
    signed=st.booleans(),
    act_order=st.booleans(),
)
def test_the_weight_has_the_bits_of_the_formula(
    seed: int, bits: int, group: int, dtype: torch.dtype, kind: str, signed: bool, act_order: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    outputs, inputs = 5, 512
    low = -(1 << (bits - 1)) if signed else 0
    values = torch.randint(low, low + (1 << bits), (outputs, inputs), generator=generator)
    scales = torch.randn(outputs, inputs // group, generator=generator).to(dtype)
    zeros = None
    if kind != "none":
        zeros = torch.randint(low, low + (1 << bits), scales.shape, generator=generator)
        zeros = torch.full_like(zeros, int(zeros[0, 0])) if kind == "equal" else zeros
    of_input = torch.arange(inputs) // group
    if act_order:
        of_input = of_input[torch.randperm(inputs, generator=generator)]
    integers = values if zeros is None else values - zeros[:, of_input]
    expected = integers.float() * scales[:, of_input].float()
    try:
        weight = affine_weight(SOURCE, values, zeros, scales, bits, of_input if act_order else None)
    except UnsupportedCheckpoint:
        # Only integers that need nine bits cannot be kept.
        assert bits == 8 and (kind == "none" or int(integers.min()) < -128 or int(integers.max()) > 127)
        return
    assert torch.equal(weight.dequantize(), expected)
    assert weight.bits == 4 or bits > 4 or (kind != "none" and dtype == torch.float32)
    # Kernels of 4 bits that subtract minimums have no sign.
    assert weight.bits != 4 or weight.minimums is None or int(weight.values.min()) >= 0


def test_symmetric_values_of_four_bits_need_no_minimums() -> None:
    values = torch.randint(0, 16, (4, 64))
    weight = affine_weight(SOURCE, values, torch.full((4, 2), 8), torch.rand(4, 2), 4)
    assert (weight.bits, weight.minimums) == (4, None)
    assert torch.equal(weight.values, values - 8)


def test_zero_points_under_precise_scales_are_subtracted_before() -> None:
    """The product of a scale of 24 bits and an integer is rounded, so minimums would be rounded twice."""
    values, zeros = torch.randint(0, 16, (4, 64)), torch.tensor([[0, 15]]).expand(4, 2)
    weight = affine_weight(SOURCE, values, zeros, torch.full((4, 2), 1 / 3), 4)
    assert (weight.bits, weight.minimums) == (6, None)


def test_groups_in_their_own_order_have_no_permutation() -> None:
    values = torch.randint(-8, 8, (4, 64))
    assert affine_weight(SOURCE, values, None, torch.rand(4, 2), 4, torch.arange(64) // 32).order is None


def test_large_groups_become_groups_of_128() -> None:
    weight = affine_weight(SOURCE, torch.randint(-8, 8, (4, 1024)), None, torch.rand(4, 4), 4)
    assert (weight.group, tuple(weight.scales.shape)) == (128, (4, 8))


@pytest.mark.parametrize(
    ("groups", "of_input", "kind"),
    [
        (8, None, UnsupportedCheckpoint),  # of 8 inputs
        (3, None, UnsupportedCheckpoint),  # 64 inputs do not divide
        (2, torch.zeros(64, dtype=torch.int32), UnsupportedCheckpoint),  # one group has all
        (2, torch.full((64,), 7), DamagedCheckpoint),  # there is no such group
        (2, torch.arange(63) // 32, DamagedCheckpoint),  # of 63 inputs
    ],
)
def test_groups_that_no_kernel_has_are_refused(
    groups: int, of_input: torch.Tensor | None, kind: type[DamagedCheckpoint | UnsupportedCheckpoint]
) -> None:
    with raises(kind, source="checkpoint"):
        affine_weight(SOURCE, torch.zeros(4, 64, dtype=torch.int8), None, torch.ones(4, groups), 4, of_input)


def test_shapes_and_scales_that_do_not_fit_are_damage() -> None:
    values = torch.zeros(4, 64, dtype=torch.int8)
    for scales, zeros in (
        (torch.ones(3, 2), None),
        (torch.ones(4), None),
        (torch.ones(4, 2), torch.zeros(4, 1, dtype=torch.int8)),
        (torch.full((4, 2), float("nan")), None),
    ):
        with raises(DamagedCheckpoint):
            affine_weight(SOURCE, values, zeros, scales, 4)

"""The ops over integers of quantised checkpoints: they hold these exactly, and multiply as they are defined to.

``test_other_cpus.py`` runs this file again for CPUs with less than this one.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.forms.grouped import pack_grouped
from speccompile.ops.cpu.forms.int8 import GROUP as INPUT_GROUP
from speccompile.ops.cpu.forms.int8 import quantise
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.packing import Pack
from speccompile.quantized import GroupedWeight
from speccompile.quantized.weight import GROUPS, RANGES
from speccompile.utils.fp4 import NUMBERS

WIDEST = 16


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops("rounded") is None


def random_weight(
    outputs: int,
    inputs: int,
    bits: int,
    group: int,
    *,
    minimums: bool,
    order: bool,
    signed: bool,
    scales: Literal["float32", "float16", "steps"],
    seed: int,
    fp4: bool = False,
) -> GroupedWeight:
    """``steps`` are a float16 for each 256 inputs times whole numbers, as K-quants have them. ``fp4``: values are those
    of MXFP4."""
    generator = torch.Generator().manual_seed(seed)
    low, high = RANGES[bits]
    if bits == 4:
        low, high = (-8, 7) if signed else (0, 15)
    shape = outputs, inputs // group
    drawn = [torch.randn(shape, generator=generator) / 16 for _ in range(2)]
    if scales == "float16":
        drawn = [values.half().float() for values in drawn]
    elif scales == "steps":
        units = [values[:, torch.arange(shape[1]) * group // 256].half().float() for values in drawn]
        drawn = [unit * torch.randint(-20, 64, shape, generator=generator) for unit in units]
    values = torch.randint(low, high + 1, (outputs, inputs), generator=generator, dtype=torch.int8)
    if fp4:
        values = torch.tensor(NUMBERS, dtype=torch.int8)[torch.randint(16, (outputs, inputs), generator=generator)]
    return GroupedWeight(
        values,
        bits,
        drawn[0],
        drawn[1] if minimums else None,
        group,
        torch.randperm(inputs, generator=generator) if order else None,
    )


@st.composite
def weights(draw: st.DrawFn) -> GroupedWeight:
    """Of every group, kind of numbers and scales, around the sizes of blocks (32 outputs, 64 inputs)."""
    group = draw(st.sampled_from(GROUPS))
    inputs = group * draw(st.sampled_from([1, 2, 3, 6, 512 // group]))
    if draw(st.integers(0, 4)) == 0:
        # One scale for each output.
        inputs = group = draw(st.sampled_from([7, 40, 100, 192]))
    bits = draw(st.sampled_from(sorted(RANGES)))
    return random_weight(
        draw(st.sampled_from([1, 32, 33, 70])),
        inputs,
        bits,
        group,
        minimums=draw(st.booleans()),
        order=draw(st.booleans()),
        signed=draw(st.booleans()),
        scales=draw(st.sampled_from(["float32", "float16", "steps"])),
        seed=draw(st.integers(0, 99)),
        fp4=bits == 6 and draw(st.booleans()),
    )


def packed(weight: GroupedWeight) -> Pack:
    form, tensors = pack_grouped(weight)
    return Pack(form, tensors, *weight.shape, None, format="a format", order=weight.order)


def definition(x: torch.Tensor, weight: GroupedWeight) -> tuple[torch.Tensor, torch.Tensor]:
    """In float64: the weight, not rounded again, times inputs rounded to eight bits in groups of 64; and the sum of the
    sizes of all terms."""
    numbers, scales = quantise(x if weight.order is None else x[:, weight.order])
    inputs = (numbers.double() * scales.double()[..., None]).flatten(1)[:, : x.shape[1]]
    scaled = weight.values.double().unflatten(1, (-1, weight.group)) * weight.scales.double()[..., None]
    minimums = torch.zeros(1) if weight.minimums is None else weight.minimums.double()[..., None]
    sizes = scaled.abs() + minimums.abs()
    return inputs @ (scaled - minimums).flatten(1).t(), inputs.abs() @ sizes.flatten(1).t()


@settings(max_examples=50)
@given(weights())
def test_a_pack_holds_every_integer(weight: GroupedWeight) -> None:
    assert torch.equal(packed(weight).dequantized(), weight.dequantize())


@settings(max_examples=50)
@given(weights(), st.integers(1, WIDEST), st.booleans())
def test_a_linear_is_its_definition_at_every_width(weight: GroupedWeight, width: int, with_bias: bool) -> None:
    pack, (outputs, inputs) = packed(weight), weight.shape
    generator = torch.Generator().manual_seed(width)
    x, bias = torch.randn(WIDEST, inputs, generator=generator), torch.randn(outputs) if with_bias else None
    result = pack.form.linear(pack.ordered(x), *pack.tensors, bias, outputs)
    wanted, size = definition(x, weight)
    difference = (result - wanted - (0 if bias is None else bias)).abs()
    assert bool((difference <= 1e-6 * (size + 1)).all())
    first = WIDEST - width
    assert torch.equal(pack.form.linear(pack.ordered(x[first:]), *pack.tensors, bias, outputs), result[first:])


@settings(max_examples=20)
@given(st.lists(weights(), min_size=4, max_size=8))
def test_weights_of_different_groups_are_joined(many: list[GroupedWeight]) -> None:
    found = [packed(weight) for weight in many]
    for pack in found:
        same = [other for other in found if (other.form, other.depth) == (pack.form, pack.depth)]
        x = torch.randn(3, pack.depth)
        lists = map(list, zip(*(other.tensors for other in same), strict=True))
        joined = pack.form.linears(x, *lists, [], [other.features for other in same])
        alone = [other.form.linear(x, *other.tensors, None, other.features) for other in same]
        assert all(map(torch.equal, joined, alone))


@settings(max_examples=30)
@given(weights())
def test_an_embedding_is_the_dequantised_weight(weight: GroupedWeight) -> None:
    pack = packed(replace(weight, order=None))
    ids = torch.randint(weight.shape[0], (2, 3))
    assert torch.equal(pack.form.embedding(*pack.tensors, ids, pack.depth), pack.dequantized()[ids])


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("bits", RANGES)
@pytest.mark.parametrize("minimums", [False, True])
def test_the_ends_of_ranges_do_not_overflow(bits: int, minimums: bool, sign: int) -> None:
    # Those of fp4, too.
    ends = (*RANGES[bits], -12, 12) if bits != 4 else (0, 15) if minimums else (-8, 7)
    for end in ends:
        scales = torch.ones(33, 2)
        weight = GroupedWeight(
            torch.full((33, 256), end, dtype=torch.int8), bits, scales, scales if minimums else None, 128
        )
        pack = packed(weight)
        result = pack.form.linear(torch.full((9, 256), float(sign)), *pack.tensors, None, 33)
        torch.testing.assert_close(result, torch.full((9, 33), 256.0 * sign * (end - minimums)))


#: Of results with these bits and groups, with minimums and without, on every kind of CPU.
DIGESTS: dict[tuple[int, int, bool], str] = {
    (4, 32, False): "5e0326f1aab42ef8",
    (4, 32, True): "2a46ce917c9f3e9f",
    (4, 128, False): "b8b62be625299d88",
    (4, 128, True): "a7faf46393eaf476",
    (6, 16, False): "2e62dafb97331b35",
    (6, 16, True): "0643c441e8722e55",
    (8, 32, False): "216d087df28a7c84",
    (8, 32, True): "8a989d91fc9a4b79",
    (8, 64, False): "5255f6ec52226c03",
    (8, 64, True): "7653de42eb1395df",
    (8, 256, False): "71ce6d65cd34c862",
    (8, 256, True): "448492c3473004a4",
}


@pytest.mark.parametrize(("group", "digest"), [(16, "3ad75af02a426e73"), (32, "90ddf5d4e6ccab40")])
def test_results_of_fp4_have_the_same_bits_on_every_cpu(group: int, digest: str) -> None:
    inputs, outputs = 256, 70
    codes = torch.arange(outputs * inputs).mul(104729).remainder(16)
    scales = torch.exp2(torch.arange(outputs * inputs // group).mul(7919).remainder(23) - 17.0).reshape(outputs, -1)
    values = torch.tensor(NUMBERS, dtype=torch.int8)[codes].reshape(outputs, inputs)
    pack = packed(GroupedWeight(values, 6, scales, None, group))
    x = torch.arange(9 * inputs).mul(7919).remainder(2003).sub(1001).float().reshape(9, inputs) / 271
    result = pack.form.linear(x, *pack.tensors, None, outputs)
    assert pack.form.name == "fp4"
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == digest


@pytest.mark.parametrize("minimums", [False, True])
@pytest.mark.parametrize("bits, group", [(4, 32), (4, 128), (6, 16), (8, 32), (8, 64), (8, 256)])
def test_results_have_the_same_bits_on_every_cpu(bits: int, group: int, minimums: bool) -> None:
    inputs, outputs = 256, 70
    low, high = RANGES[bits] if bits != 4 else (0, 15) if minimums else (-8, 7)
    values = torch.arange(outputs * inputs).mul(104729).remainder(high - low + 1).add(low).to(torch.int8)
    scales = torch.arange(outputs * inputs // group).mul(7919).remainder(211).sub(99).float() / 997
    scales = scales.reshape(outputs, -1)
    weight = GroupedWeight(values.reshape(outputs, inputs), bits, scales, scales.flip(0) if minimums else None, group)
    x = torch.arange(9 * inputs).mul(7919).remainder(2003).sub(1001).float().reshape(9, inputs) / 271
    pack = packed(weight)
    result = pack.form.linear(x, *pack.tensors, None, outputs)
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == DIGESTS[bits, group, minimums]


def test_a_row_with_what_is_no_number_stays_alone() -> None:
    weight = random_weight(40, 128, 4, 32, minimums=True, order=False, signed=False, scales="float32", seed=0)
    pack, x = packed(weight), torch.randn(3, 128)
    x[1, 5] = torch.nan
    result = pack.form.linear(x, *pack.tensors, None, 40)
    assert result[1].isnan().all() and not result[[0, 2]].isnan().any()


def test_scales_of_another_size_or_dtype_are_refused() -> None:
    weight = random_weight(40, 192, 8, 64, minimums=False, order=False, signed=True, scales="float16", seed=0)
    pack = packed(weight)
    numbers, scales = pack.tensors
    for wrong in (scales[:, :2], scales.repeat(1, 3, 1), scales[..., :16], scales[:, :, None], scales.bfloat16()):
        with pytest.raises(RuntimeError, match="speccompile::int8_linear"):
            pack.form.linear(torch.randn(1, 192), numbers, wrong.contiguous(), None, 40)


@pytest.mark.parametrize(
    ("bits", "group", "minimums", "signed", "scales", "form", "scale_bytes"),
    [
        (4, 32, False, True, "float16", "int4", 2),
        (4, 128, False, True, "float16", "int4", 2),
        (4, 32, True, False, "float16", "int4", 8),
        (4, 32, True, False, "steps", "int4", 2.5),
        # Without a sign and minimums they get some that are zeros.
        (4, 128, False, False, "float16", "int4", 8),
        (4, 16, False, True, "float16", "int8", 2),
        (4, 32, True, True, "float32", "int8", 8),
        (6, 16, False, True, "float32", "int8", 4),
        (6, 16, False, True, "steps", "int8", 1.125),
        (8, 32, True, True, "float32", "int8", 8),
    ],
)
def test_bytes_of_a_packed_weight(
    bits: int, group: int, minimums: bool, signed: bool, scales: Any, form: str, scale_bytes: float
) -> None:
    weight = random_weight(64, 256, bits, group, minimums=minimums, order=False, signed=signed, scales=scales, seed=0)
    pack = packed(weight)
    numbers = 64 * 256 // (2 if form == "int4" else 1)
    assert pack.form.name == form and pack.nbytes == numbers + 64 * 256 // group * scale_bytes


@pytest.mark.parametrize(
    ("group", "scales", "scale_bytes"),
    [(16, "float32", 4), (32, "float16", 2), (32, "float32", 4), (128, "float16", 2)],
)
def test_bytes_of_a_weight_of_mxfp4(group: int, scales: Any, scale_bytes: int) -> None:
    kind: Any = dict(minimums=False, order=False, signed=True, scales=scales, seed=0, fp4=True)
    pack = packed(random_weight(64, 256, 6, group, **kind))
    assert pack.form.name == "fp4" and pack.nbytes == 64 * 256 // 2 + 64 * 256 // group * scale_bytes
    assert packed(random_weight(64, 256, 6, group, **kind | {"minimums": True})).form.name == "int8"


def test_inputs_of_a_group_are_whole_blocks() -> None:
    """The groups above are of these: a group of a weight never ends within a part of a group of inputs."""
    assert all(INPUT_GROUP % group == 0 or group % INPUT_GROUP == 0 for group in GROUPS)

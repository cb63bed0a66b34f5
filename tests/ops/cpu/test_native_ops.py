"""The C++ ops: what they compute, and that a row's result has the same bits whatever is computed beside it.

``test_other_cpus.py`` runs this file again for CPUs with less than this one.
"""

from __future__ import annotations

import hashlib

import gguf
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops.native  # noqa: F401  defines the ops
from speccompile.ops.attention import reference
from speccompile.ops.cpu.forms import FORMS, Form
from speccompile.ops.cpu.forms.int4 import quantise_int4
from speccompile.ops.cpu.forms.int8 import quantise
from speccompile.ops.cpu.forms.same import pack, unpack
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.packing import PACKED_DTYPES, WeightPacks

ops = torch.ops.speccompile
# A unit in the last place of the result's dtype; sums of float32 take a few.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}

ROUNDED = [form for form in FORMS.values() if form.rounds]
forms = pytest.mark.parametrize("form", ROUNDED, ids=[form.name for form in ROUNDED])
dtypes = pytest.mark.parametrize("dtype", PACKED_DTYPES, ids=str)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops("rounded") is None


# Around the sizes of blocks (32 outputs, 256 inputs) and tiles (3, 6, 12 rows), and far from them.
features = st.sampled_from([1, 31, 32, 33, 64, 70, 200])
depths = st.sampled_from([1, 7, 255, 256, 257, 600])
row_counts = st.integers(1, 30)


@dtypes
@settings(max_examples=25)
@given(features, depths, row_counts, st.booleans(), st.integers(0, 99))
def test_packed_linear_is_a_linear(
    dtype: torch.dtype, outputs: int, depth: int, rows: int, with_bias: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, depth, generator=generator).to(dtype)
    weight = (torch.randn(outputs, depth, generator=generator) / depth**0.5).to(dtype)
    bias = torch.randn(outputs, generator=generator).to(dtype) if with_bias else None
    result = ops.packed_linear(x, pack(weight), bias, outputs)
    assert result.dtype == dtype
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(result.double(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@dtypes
def test_a_bias_may_lie_in_any_way(dtype: torch.dtype) -> None:
    x, weight = torch.randn(3, 64).to(dtype), torch.randn(40, 64).to(dtype)
    for bias in (torch.randn(80).to(dtype)[::2], torch.randn(1).to(dtype).expand(40)):
        for form in FORMS.values():
            arguments = (x, *form.pack(weight))
            assert torch.equal(form.linear(*arguments, bias, 40), form.linear(*arguments, bias.contiguous(), 40))


def test_a_bias_of_another_dtype_is_refused() -> None:
    """As torch's own linear refuses it."""
    x, weight = torch.randn(3, 64).bfloat16(), torch.randn(40, 64).bfloat16()
    with pytest.raises(RuntimeError, match="different dtypes"):
        ops.packed_linear(x, pack(weight), torch.randn(40), 40)


@dtypes
@settings(max_examples=30)
@given(features, depths, st.data())
def test_a_row_has_the_same_bits_in_any_company(
    dtype: torch.dtype, outputs: int, depth: int, data: st.DataObject
) -> None:
    x, packed = torch.randn(30, depth).to(dtype), pack(torch.randn(outputs, depth).to(dtype))
    whole = ops.packed_linear(x, packed, None, outputs)
    first = data.draw(st.integers(0, 29))
    last = data.draw(st.integers(first + 1, 30))
    assert torch.equal(ops.packed_linear(x[first:last], packed, None, outputs), whole[first:last])


@dtypes
@settings(max_examples=15)
@given(st.lists(features, min_size=1, max_size=4), depths, row_counts, st.booleans())
def test_several_linears_are_those_that_they_join(
    dtype: torch.dtype, counts: list[int], depth: int, rows: int, with_bias: bool
) -> None:
    x, weights = torch.randn(rows, depth).to(dtype), [torch.randn(count, depth).to(dtype) for count in counts]
    biases = [torch.randn(count).to(dtype) for count in counts] if with_bias else []
    each = list(zip(weights, biases or [None] * len(counts), counts, strict=True))
    for form in FORMS.values():
        packed = [form.pack(weight) for weight in weights]
        joined = form.linears(x, *map(list, zip(*packed, strict=True)), biases, counts)
        alone = [form.linear(x, *own, bias, count) for own, (_, bias, count) in zip(packed, each, strict=True)]
        assert all(map(torch.equal, joined, alone)) and {result.dtype for result in joined} == {dtype}


def test_any_leading_dimensions_and_strides() -> None:
    x, weight = torch.randn(2, 12, 3), torch.randn(40, 12)
    result = ops.packed_linear(x.transpose(1, 2), pack(weight), None, 40)
    torch.testing.assert_close(result, F.linear(x.transpose(1, 2), weight))


def test_threads_change_no_bit() -> None:
    x, packed = torch.randn(5, 300), pack(torch.randn(1000, 300))
    q, cache = torch.randn(1, 2, 4, 16), torch.randn(2, 1, 600, 2, 16)
    arguments = (q, *cache, torch.tensor([0]), torch.tensor([[500, 501]]), 0.25)
    results = []
    threads = torch.get_num_threads()
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        results.append((ops.packed_linear(x, packed, None, 1000), ops.native_attention(*arguments)))
    torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for result in results for a, b in zip(result, results[0], strict=True))


@dtypes
def test_packed_embedding_is_an_embedding(dtype: torch.dtype) -> None:
    weight, ids = torch.randn(100, 48).to(dtype), torch.randint(100, (2, 5))
    assert torch.equal(ops.packed_embedding(pack(weight), ids), F.embedding(ids, weight))


@pytest.mark.parametrize("wrong", [-1, 128, 2**40])
def test_ids_outside_of_the_weight_are_refused(wrong: int) -> None:
    weight, ids = torch.randn(100, 64), torch.tensor([3, wrong])
    with pytest.raises(RuntimeError, match="index out of range"):
        ops.packed_embedding(pack(weight), ids)
    for form in ROUNDED:
        with pytest.raises(RuntimeError, match="index out of range"):
            form.embedding(*form.pack(weight), ids, 64)


@given(features, depths)
def test_unpacking_gives_the_weight_back(outputs: int, depth: int) -> None:
    weight = torch.randn(outputs, depth)
    packed = pack(weight)
    assert packed.shape == (-(-outputs // 32), depth, 32)
    assert torch.equal(unpack(packed, outputs), weight)


def test_a_pack_is_made_once_and_follows_its_weight() -> None:
    packs, weight = WeightPacks(), torch.randn(64, 8)
    (packed,) = packs.of("a", weight).tensors
    assert packs.of("a", weight).tensors[0] is packed and len(packs) == 1 and packs.nbytes == packed.nbytes
    weight.mul_(2)
    packs.refresh()
    assert torch.equal(unpack(packed, 64), weight)


@dtypes
@settings(max_examples=25)
@given(
    data=st.data(),
    groups=st.integers(1, 3),
    per_group=st.sampled_from([1, 3, 7]),
    depth=st.sampled_from([8, 16, 33, 64]),
    value_depth=st.sampled_from([8, 40, 64]),
    width=st.sampled_from([1, 2, 5, 17, 40]),
)
def test_attention_is_its_definition(
    dtype: torch.dtype, data: st.DataObject, groups: int, per_group: int, depth: int, value_depth: int, width: int
) -> None:
    """Blocks of 128 keys are crossed; what lies after a row's own text is not a number, and not read."""
    places = 300
    heads = groups * per_group
    q = torch.randn(2, width, heads, depth).to(dtype)
    k, v = torch.randn(3, places, groups, depth).to(dtype), torch.randn(3, places, groups, value_depth).to(dtype)
    slots = torch.tensor(data.draw(st.sampled_from([[0, 2], [2, 1]])))
    starts = torch.tensor([data.draw(st.integers(0, places - width)) for _ in range(2)])
    positions = starts[:, None] + torch.arange(width)
    options = {
        "window": data.draw(st.sampled_from([None, 1, 50, 129])),
        "chunk": data.draw(st.sampled_from([None, 60, 128])),
        "softcap": data.draw(st.sampled_from([None, 2.0])),
        "sinks": torch.randn(heads).to(dtype) if data.draw(st.booleans()) else None,
    }
    wanted = reference(q, k, v, slots, positions, depth**-0.5, **options)
    for row, slot in enumerate(slots.tolist()):
        k[slot, positions[row, -1] + 1 :] = v[slot, positions[row, -1] + 1 :] = torch.nan
    result = ops.native_attention(q, k, v, slots, positions, depth**-0.5, **options)
    torch.testing.assert_close(result, wanted, rtol=2 * TOLERANCE[dtype], atol=2 * TOLERANCE[dtype])
    row, place = data.draw(st.integers(0, 1)), data.draw(st.integers(0, width - 1))
    alone = ops.native_attention(
        q[row : row + 1, place : place + 1],
        k,
        v,
        slots[row : row + 1],
        positions[row : row + 1, place : place + 1],
        depth**-0.5,
        **options,
    )
    assert torch.equal(alone[0, 0], result[row, place])


def rounded_reference(form: Form, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    inputs, scales = quantise(x)
    values = (inputs.double() * scales.double()[..., None]).flatten(1)[:, : x.shape[1]]
    return values @ form.unpack(form.pack(weight), *weight.shape).double().t() + bias.double()


@forms
@settings(max_examples=40)
@given(features, depths, row_counts, st.integers(0, 99))
def test_a_rounded_linear_is_its_definition(form: Form, outputs: int, depth: int, rows: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, weight = torch.randn(rows, depth, generator=generator), torch.randn(outputs, depth, generator=generator)
    bias = torch.randn(outputs, generator=generator)
    x[0] = 0
    packed = form.pack(weight)
    result = form.linear(x, *packed, bias, outputs)
    torch.testing.assert_close(result.double(), rounded_reference(form, x, weight, bias), rtol=1e-5, atol=1e-4)
    first = rows // 2
    assert torch.equal(form.linear(x[first : first + 3], *packed, bias, outputs), result[first : first + 3])


@forms
def test_a_rounded_linear_is_near_what_it_rounds(form: Form) -> None:
    x, weight = torch.randn(8, 512), torch.randn(64, 512)
    wanted = F.linear(x, weight)
    error = form.linear(x, *form.pack(weight), None, 64) - wanted
    assert error.norm() / wanted.norm() < {"int8": 0.01, "int4": 0.1, "fp4": 0.12}[form.name]


@forms
@given(features, depths)
@settings(max_examples=15)
def test_a_rounded_weight_holds_its_weight_and_no_other(form: Form, outputs: int, depth: int) -> None:
    weight = torch.randn(outputs, depth)
    packed = form.pack(weight)
    values = form.unpack(packed, outputs, depth)
    assert form.holds(*form.distance(weight, values)) and not form.holds(*form.distance(-weight, values))
    assert sum(tensor.nbytes for tensor in packed) == form.nbytes(outputs, depth, 4)


def test_int4_holds_no_weight_beyond_its_scales() -> None:
    form = FORMS["int4"]
    for value in (1e7, 1e30, 1e-9, 1e-30):
        weight = torch.full((32, 64), value)
        assert not form.holds(*form.distance(weight, form.unpack(form.pack(weight), 32, 64)))


def test_int4_numbers_are_those_of_q4_0() -> None:
    """Of gguf, which quantises rows of whole groups."""
    weight = torch.randn(7, 192, generator=torch.Generator().manual_seed(0))
    theirs = gguf.quants.dequantize(
        gguf.quants.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q4_0), gguf.GGMLQuantizationType.Q4_0
    )
    numbers, scales = quantise_int4(weight)
    # Where a number is halfway between two, theirs rounds up, and the greatest of a group may occur with both signs.
    ours = (numbers * scales.float()[..., None]).flatten(1)
    assert float((ours - torch.from_numpy(theirs)).norm() / weight.norm()) < 0.005


def test_int4_has_the_same_bits_on_every_cpu() -> None:
    """Run for each kind of CPU by ``test_other_cpus.py``: integers, and sums in one order."""
    numbers = torch.arange(0, 5 * 320).mul(7919).remainder(2003).sub(1001)
    x = (numbers.float() / 271).reshape(5, 320)
    weight = (torch.arange(0, 70 * 320).mul(104729).remainder(3001).sub(1500).float() / 997).reshape(70, 320)
    result = ops.int4_linear(x, *FORMS["int4"].pack(weight), None, 70)
    assert hashlib.sha256(result.numpy().tobytes()).hexdigest()[:16] == "698d99420fe5bf02"


@forms
def test_a_rounded_embedding_is_the_rounded_weight(form: Form) -> None:
    weight, ids = torch.randn(100, 70), torch.randint(100, (2, 5))
    packed = form.pack(weight)
    assert torch.equal(form.embedding(*packed, ids, 70), form.unpack(packed, 100, 70)[ids])


@forms
@pytest.mark.parametrize("weight", [-3.0, 3.0])
@pytest.mark.parametrize("x", [-2.0, 2.0])
def test_the_ends_of_rounded_numbers_do_not_overflow(form: Form, x: float, weight: float) -> None:
    result = form.linear(torch.full((3, 192), x), *form.pack(torch.full((40, 192), weight)), None, 40)
    torch.testing.assert_close(result, torch.full((3, 40), 192 * x * weight))


@forms
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_what_is_no_number_stays_so_in_its_row(form: Form, value: float) -> None:
    x = torch.randn(3, 64)
    x[1, 5] = value
    result = form.linear(x, *form.pack(torch.randn(40, 64)), None, 40)
    assert result[1].isnan().all() and not result[[0, 2]].isnan().any()


@forms
def test_inputs_too_small_to_be_scaled_are_zeros(form: Form) -> None:
    x = torch.full((2, 64), 1e-37)
    x[1] = 1.0
    result = form.linear(x, *form.pack(torch.full((40, 64), 12.0)), None, 40)
    assert torch.equal(result[0], torch.zeros(40)) and result[1].allclose(torch.tensor(768.0))


@forms
def test_a_rounded_weight_of_another_size_is_refused(form: Form) -> None:
    with pytest.raises(RuntimeError, match=f"speccompile::{form.name}_linear: the sizes do not fit"):
        form.linear(torch.randn(1, 65), *form.pack(torch.randn(4, 64)), None, 4)


def test_what_attention_cannot_do_is_refused() -> None:
    q, cache = torch.randn(1, 1, 2, 8), torch.randn(2, 1, 4, 2, 8)
    arguments = (q, *cache, torch.tensor([0]), torch.tensor([[2]]), 1.0)
    with pytest.raises(RuntimeError, match="node 0 has the parent 0"):
        ops.native_attention(*arguments, parents=torch.tensor([[0]]))
    with pytest.raises(RuntimeError, match="needs a window of at least 1, not 0"):
        ops.native_attention(*arguments, window=0)
    with pytest.raises(RuntimeError, match="different dtypes"):
        ops.native_attention(q, cache[0].half(), cache[1], *arguments[3:])
    with pytest.raises(RuntimeError, match="the sizes do not fit"):
        ops.packed_linear(torch.randn(1, 9), pack(torch.randn(4, 8)), None, 4)

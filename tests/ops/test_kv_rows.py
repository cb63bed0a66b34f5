"""Keys and values of 8 bits: what they hold, and that attention over them is attention over what they hold."""

from __future__ import annotations

from typing import Any

import gguf
import pytest
import torch
from gguf.quants import quantize
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.attention import reference
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.kv_rows import GROUP, features_of, from_rows, has_nan, round_kv, row_size, to_rows, widen_kv
from speccompile.ops.rotary_attention import reference as rotary_reference

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
SLOTS, PLACES = 3, 300


def real(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 600))
def test_the_size_of_a_row_tells_its_features(features: int) -> None:
    rows = torch.empty(1, row_size(features, torch.int8), dtype=torch.int8)
    assert features_of(rows) == features
    assert row_size(features, torch.float16) == features_of(torch.empty(1, features)) == features


def test_scales_and_integers_are_those_of_llama_cpp() -> None:
    x = real(0, 64, 8 * GROUP) * real(1, 64, 1).exp()
    blocks = torch.from_numpy(quantize(x.numpy(), gguf.GGMLQuantizationType.Q8_0)).view(64, 8, 2 + GROUP)
    rows = round_kv(x)
    integers, scales = rows[:, : x.shape[1]].view(64, 8, GROUP), rows[:, x.shape[1] :].view(64, 8, 2)
    assert torch.equal(scales.view(torch.uint8), blocks[..., :2])
    # It divides by the scale before that is rounded.
    change = (integers.int() - blocks[..., 2:].contiguous().view(torch.int8).int()).abs()
    assert change.max() <= 1 and change.float().mean() < 0.02


@pytest.mark.parametrize("features", [2, 16, 32, 80, 96])
def test_each_feature_is_the_nearest_multiple_of_its_scale(features: int) -> None:
    x = real(2, 50, features)
    x[0], x[1, :2] = 0.0, 1e-9
    widened = widen_kv(round_kv(x))
    for first in range(0, features, GROUP):
        own, group = x[:, first : first + GROUP], widened[:, first : first + GROUP]
        scale = (own.abs().amax(-1, keepdim=True) / 127).half().float()
        # The scale is rounded too: the largest feature may be further away.
        assert ((own - group).abs() <= scale * 0.5 + own.abs() * 2**-11 + 1e-8).all()
    assert torch.equal(widened[0], torch.zeros(features))
    assert torch.equal(widen_kv(round_kv(widened)), widened)


def test_what_is_no_number_stays_so() -> None:
    x = real(3, 4, 2 * GROUP)
    x[1, 5], x[2, 40] = torch.nan, torch.inf
    widened = widen_kv(round_kv(x))
    assert widened[1, :GROUP].isnan().all() and widened[1, GROUP:].isfinite().all()
    assert widened[2, GROUP:].isnan().all()
    assert has_nan(round_kv(x)) and not has_nan(round_kv(x[:1]))


def arguments(width: int, dims: tuple[int, int], dtype: torch.dtype, seed: int, tree: bool) -> dict[str, Any]:
    positions = torch.tensor([[250], [37]]) + torch.arange(width)
    parents = None
    if tree:
        parents = torch.tensor([[(node - 1) // 2 for node in range(width)]] * 2)
        parents[:, 0] = -1
        positions = positions[:, :1] + torch.tensor([(node + 1).bit_length() - 1 for node in range(width)])
    return {
        "q": real(seed, 2, width, 4, dims[0]).to(dtype),
        "k_cache": round_kv(real(seed + 1, SLOTS, PLACES, 2, dims[0])),
        "v_cache": round_kv(real(seed + 2, SLOTS, PLACES, 2, dims[1])),
        "slots": torch.tensor([2, 0]),
        "positions": positions,
        "scale": 0.2,
        "parents": parents,
    }


CASES = st.fixed_dictionaries(
    {
        "width": st.integers(1, 16),
        "dims": st.sampled_from([(64, 64), (16, 24), (80, 96), (32, 256)]),
        "dtype": st.sampled_from([torch.float32, torch.bfloat16]),
        "seed": st.integers(0, 10**6),
        "tree": st.booleans(),
    }
)
OPTIONS = st.sampled_from([{}, {"window": 150}, {"chunk": 200, "softcap": 2.0}, {"sinks": torch.ones(4)}])


@settings(deadline=None, max_examples=40)
@given(CASES, OPTIONS)
def test_attention_has_the_bits_of_what_the_rows_hold(case: dict[str, Any], options: dict[str, Any]) -> None:
    own = arguments(**case)
    wide = own | {name: widen_kv(own[name]) for name in ("k_cache", "v_cache")}
    found = OPS.native_attention(**own, **options)
    assert torch.equal(found, OPS.native_attention(**wide, **options))
    tolerance = 2e-5 if found.dtype is torch.float32 else 4e-2
    for op in (reference, OPS.attention):
        torch.testing.assert_close(op(**own, **options), found, rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=25)
@given(CASES)
def test_rotary_attention_writes_the_rows_of_the_reference(case: dict[str, Any]) -> None:
    own, width, (dim, value_dim) = arguments(**case), case["width"], case["dims"]
    given = {
        "k": real(7, 2, width, 2, dim),
        "v": real(8, 2, width, 2, value_dim),
        "cos": real(9, 2, width, 16),
        "sin": real(10, 2, width, 16),
    }
    own |= {name: tensor.to(case["dtype"]) for name, tensor in given.items()}
    other = own | {name: own[name].clone() for name in ("k_cache", "v_cache")}
    found, expected = OPS.native_rotary_attention(**own), rotary_reference(**other)
    for name in ("k_cache", "v_cache"):
        held, wanted = from_rows(own[name], torch.float32), from_rows(other[name], torch.float32)
        # The last bit of a rotated key decides on some roundings.
        torch.testing.assert_close(held, wanted, rtol=0.02, atol=0.03)
        assert (held != wanted).float().mean() < 1e-3
    tolerance = 2e-3 if case["dtype"] is torch.float32 else 6e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_a_cache_of_another_size_is_refused() -> None:
    own = arguments(3, (64, 64), torch.float32, 0, False)
    own["k_cache"] = to_rows(real(0, SLOTS, PLACES, 2, 32), torch.int8)
    with pytest.raises(RuntimeError, match="rows of 8 bits hold 32 features, and queries have 64"):
        OPS.native_attention(**own)

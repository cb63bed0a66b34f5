"""The attention ops against their definition, and what they promise about the order of reduction."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import masking_utils
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

import speccompile.ops.native  # noqa: F401  defines an op
from speccompile.ops.attention import BLOCK, alibi_slopes, reference
from speccompile.ops.cpu.library import load_cpu_ops

assert load_cpu_ops() is None

OPS = {
    "attention": torch.ops.speccompile.attention,
    "attention_fixed_order": torch.ops.speccompile.attention_fixed_order,
    "native_attention": torch.ops.speccompile.native_attention,
}
# Half a unit in the last place of the result's dtype, times a few for the softmax in between.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

# One of each kind of way through the kernels, and all together.
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 4},
    "chunk": {"chunk": 3},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": True},
    "all": {"window": 5, "chunk": 4, "softcap": 3.0, "sinks": True},
}

named = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
optional = pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)


@dataclass
class Case:
    """Arguments of one call; ``options`` are those that have a default."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k_cache, self.v_cache, self.slots, self.positions, self.scale

    def through(self, op: Any) -> torch.Tensor:
        return op(*self.arguments, **self.options)

    def first(self, row: int) -> int:
        """The first key that any query of a row may see."""
        positions = self.positions[row].tolist()
        return min(key for own in positions for key in range(own + 1) if sees(own, key, **self.options))


def sees(own: int, key: int, window: int | None = None, chunk: int | None = None, **_: Any) -> bool:
    return key <= own and (window is None or own - key < window) and (chunk is None or key // chunk == own // chunk)


def make(
    *,
    rows: int = 2,
    width: int = 3,
    groups: int = 2,
    per_group: int = 2,
    dim: int = 8,
    value_dim: int | None = None,
    capacity: int = 20,
    starts: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
    seed: int = 0,
    scale: float | None = None,
    sinks: bool = False,
    **options: Any,
) -> Case:
    """Rows in shuffled slots, each at positions of its own, in a cache that is full of other things."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if starts is None:
        starts = torch.randint(capacity - width + 1, (rows,), generator=generator).tolist()
    case = Case(
        q=real(rows, width, groups * per_group, dim),
        k_cache=real(rows + 1, capacity, groups, dim).to(cached or dtype),
        v_cache=real(rows + 1, capacity, groups, value_dim or dim).to(cached or dtype),
        slots=torch.randperm(rows + 1, generator=generator)[:rows],
        positions=torch.tensor(starts)[:, None] + torch.arange(width),
        scale=dim**-0.5 if scale is None else scale,
        options=options,
    )
    if sinks:
        case.options["sinks"] = 2 * real(groups * per_group)
    return case


# --- the definition ------------------------------------------------------------------------------


def by_hand(case: Case) -> torch.Tensor:
    """Every query on its own, in plain loops: what the reference has to say too."""
    rows, width, heads, _ = case.q.shape
    out = torch.empty(rows, width, heads, case.v_cache.shape[3], dtype=torch.float64)
    softcap, sinks = case.options.get("softcap"), case.options.get("sinks")
    slopes = alibi_slopes(heads, case.q.device).double() if "alibi" in case.options else torch.zeros(heads)
    for row in range(rows):
        for place in range(width):
            own = int(case.positions[row, place])
            seen = [key for key in range(own + 1) if sees(own, key, **case.options)]
            for head in range(heads):
                group = head // (heads // case.k_cache.shape[2])
                keys = case.k_cache[case.slots[row], seen, group].double()
                values = case.v_cache[case.slots[row], seen, group].double()
                weights = keys @ case.q[row, place, head].double() * case.scale
                if softcap is not None:
                    weights = softcap * (weights / softcap).tanh()
                weights = (weights + slopes[head] * (torch.tensor(seen) - own)).exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out[row, place, head] = weights / total @ values
    return out


@optional
def test_the_reference_is_attention_over_a_rows_own_past(options: dict[str, Any]) -> None:
    for sizes in ({}, {"groups": 1, "per_group": 3, "value_dim": 5}, {"rows": 3, "width": 1}):
        case = make(seed=len(sizes), **sizes, **options)
        torch.testing.assert_close(case.through(reference).double(), by_hand(case), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("op", [OPS["attention"], OPS["attention_fixed_order"]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@optional
def test_alibi_adds_a_bias_by_distance(op: Any, dtype: torch.dtype, options: dict[str, Any]) -> None:
    case = make(capacity=BLOCK + 9, starts=[3, BLOCK + 2], alibi=True, dtype=dtype, **options)
    torch.testing.assert_close(case.through(reference).double(), by_hand(case), rtol=4e-3, atol=4e-3)
    torch.testing.assert_close(case.through(op), case.through(reference), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def by_transformers(case: Case) -> torch.Tensor:
    """The eager attention of gemma2 (soft caps), or of gpt-oss where there are sinks, under transformers' own masks."""
    heads, groups, softcap = case.q.shape[2], case.k_cache.shape[2], case.options.get("softcap")
    module = SimpleNamespace(num_key_value_groups=heads // groups, training=False, sinks=case.options.get("sinks"))
    model, extra = (modeling_gemma2, {"softcap": softcap}) if module.sinks is None else (modeling_gpt_oss, {})
    masks = [masking_utils.causal_mask_function]
    if window := case.options.get("window"):
        masks.append(masking_utils.sliding_window_causal_mask_function(window))
    if chunk := case.options.get("chunk"):
        masks.append(masking_utils.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)))
    out = []
    for row, slot in enumerate(case.slots.tolist()):
        keys, values = (cache[slot][None].transpose(1, 2) for cache in (case.k_cache, case.v_cache))
        seen = masking_utils.and_masks(*masks)(0, 0, case.positions[row][:, None], torch.arange(keys.shape[2]))
        mask = torch.zeros(seen.shape, dtype=case.q.dtype).masked_fill(~seen, torch.finfo(case.q.dtype).min)
        query = case.q[row][None].transpose(1, 2)
        result, _ = model.eager_attention_forward(module, query, keys, values, mask, scaling=case.scale, **extra)
        out.append(result)
    return torch.cat(out)


asked = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(1, 12),
        "chunk": st.integers(1, 12),
        "softcap": st.sampled_from([0.5, 5.0, 50.0]),
        "sinks": st.just(True),
    },
)
shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 4),
        "width": st.integers(1, 9),
        "groups": st.integers(1, 3),
        "per_group": st.integers(1, 3),
        "dim": st.sampled_from([4, 8, 16, 24]),
        "value_dim": st.sampled_from([None, 8]),
        "capacity": st.integers(9, 40),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "seed": st.integers(0, 10**6),
        "scale": st.sampled_from([None, 0.25, 1.0]),
    }
)


@settings(deadline=None, max_examples=60)
@given(shapes, asked)
def test_the_reference_and_the_ops_are_what_transformers_computes(
    fields: dict[str, Any], options: dict[str, Any]
) -> None:
    if "sinks" in options:
        options = {name: value for name, value in options.items() if name != "softcap"}  # no model has both
    case = make(**{**fields, "dtype": torch.float64}, **options)
    # gemma2's softmax is in float32 whatever it is given.
    torch.testing.assert_close(case.through(reference), by_transformers(case), rtol=1e-6, atol=1e-6)
    case = make(**{**fields, "dtype": torch.bfloat16}, **options)
    # Of the same numbers in float32: transformers rounds scores and weights to bfloat16, we do not.
    wide = replace(case, q=case.q.float(), k_cache=case.k_cache.float(), v_cache=case.v_cache.float())
    tolerance = TOLERANCE[torch.bfloat16]
    for op in OPS.values():
        torch.testing.assert_close(case.through(op).float(), by_transformers(wide), rtol=tolerance, atol=tolerance)


@settings(deadline=None, max_examples=200)
@given(shapes, st.sampled_from([None, *TOLERANCE]), asked)
def test_both_ops_are_the_reference(
    fields: dict[str, Any], cached: torch.dtype | None, options: dict[str, Any]
) -> None:
    case = make(**fields, cached=cached, **options)
    expected = case.through(reference)
    tolerance = TOLERANCE[case.q.dtype]
    for op in OPS.values():
        got = case.through(op)
        assert got.dtype is expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@named
@pytest.mark.parametrize("capacity", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 60])
@pytest.mark.parametrize(
    "options",
    [*OPTIONS.values(), {"window": BLOCK, "sinks": True}, {"chunk": BLOCK - 1, "softcap": 3.0}, {"window": BLOCK + 1}],
    ids=str,
)
def test_long_caches_and_the_edges_of_blocks(op: Any, capacity: int, options: dict[str, Any]) -> None:
    edges = [place for place in (0, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1) if place + 2 <= capacity]
    starts = [*edges, capacity - 2]
    case = make(rows=len(starts), width=2, capacity=capacity, starts=starts, **options)
    torch.testing.assert_close(case.through(op), case.through(reference), rtol=2e-5, atol=2e-5)


@named
@optional
def test_arguments_are_only_read(op: Any, options: dict[str, Any]) -> None:
    case = make(**options)
    tensors = [*case.arguments[:-1], *(value for value in case.options.values() if isinstance(value, torch.Tensor))]
    before = [tensor.clone() for tensor in tensors]
    case.through(op)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))


@named
@optional
def test_transposed_queries_are_fine(op: Any, options: dict[str, Any]) -> None:
    """Models hand queries over as a view ``[B, H, T, D]`` turned round."""
    case = make(rows=2, width=5, **options)
    turned = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    torch.testing.assert_close(op(turned, *case.arguments[1:], **case.options), case.through(op))


@named
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("options", [{}, {"value_dim": 16}, OPTIONS["all"]], ids=["plain", "value_dim", "all"])
def test_opcheck(op: Any, width: int, options: dict[str, Any]) -> None:
    case = make(width=width, **options)
    # Neither op has a gradient, and none is asked for.
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.default, case.arguments, case.options, test_utils=checks)


# --- what a result may depend on -----------------------------------------------------------------


@named
@settings(deadline=None, max_examples=50)
@given(rows=st.integers(2, 5), width=st.integers(1, 6), seed=st.integers(0, 10**6), options=asked)
def test_neighbours_and_dead_keys_do_not_matter(
    op: Any, rows: int, width: int, seed: int, options: dict[str, Any]
) -> None:
    """Bit for bit: other rows' queries, positions and caches, and what a row's own cache holds out of its sight."""
    case, other = (make(rows=rows, width=width, seed=seed + i, **options) for i in range(2))
    row = seed % rows
    live = int(case.slots[row]), slice(case.first(row), int(case.positions[row, -1]) + 1)
    expected = case.through(op)[row]
    for changed, fresh in ((case.k_cache, other.k_cache), (case.v_cache, other.v_cache)):
        mine = changed[live].clone()
        changed.copy_(fresh * 100)
        changed[live] = mine
    for changed, fresh in ((case.q, other.q), (case.positions, other.positions)):
        mine = changed[row].clone()
        changed.copy_(fresh)
        changed[row] = mine
    assert torch.equal(case.through(op)[row], expected)


@named
@optional
@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_nothing_dead_is_read(op: Any, options: dict[str, Any], width: int, garbage: float) -> None:
    """Not other slots, nor what lies outside the live part (for the fixed order: outside its blocks) of a row's own."""
    case = make(rows=3, width=width, capacity=2 * BLOCK, starts=[0, 9, BLOCK - width], value_dim=16, **options)
    read = torch.zeros(case.k_cache.shape[:2], dtype=torch.bool)
    for row, slot in enumerate(case.slots.tolist()):
        whole = op is OPS["attention_fixed_order"]
        read[slot, slice(BLOCK) if whole else slice(case.first(row), int(case.positions[row, -1]) + 1)] = True
    expected = case.through(op)
    for cache in (case.k_cache, case.v_cache):
        cache[~read] = garbage
    assert torch.equal(case.through(op), expected)


@settings(deadline=None, max_examples=25)
@given(
    width=st.integers(1, 8),
    # Around the edges of blocks a row's last query may need one block more than this one.
    target=st.sampled_from([8, 30, BLOCK - 4, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK - 2]),
    dim=st.sampled_from([16, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    capacity=st.sampled_from([3 * BLOCK, 2 * BLOCK + 77]),
    seed=st.integers(0, 10**6),
    options=asked,
)
def test_fixed_order_does_not_depend_on_the_place(
    width: int, target: int, dim: int, dtype: torch.dtype, capacity: int, seed: int, options: dict[str, Any]
) -> None:
    """One query over one past, as each of the ``width`` queries of each row, in every slot: bit for bit the same."""
    rows = 2
    sizes: dict[str, Any] = {"rows": rows, "width": width, "dim": dim, "capacity": capacity, "dtype": dtype}
    base = make(**sizes, seed=seed, **options)
    query = base.q[0, 0].clone()
    keys, values = base.k_cache[0, : target + 1].clone(), base.v_cache[0, : target + 1].clone()
    results = []
    for row in range(rows):
        for place in range(width):
            case = make(
                **sizes,
                seed=seed + 1 + row * width + place,
                starts=[target - place if r == row else (7 * r + place) % 20 for r in range(rows)],
            )
            case.q[row, place] = query
            case.k_cache[case.slots[row], : target + 1] = keys
            case.v_cache[case.slots[row], : target + 1] = values
            results.append(OPS["attention_fixed_order"](*case.arguments, **base.options)[row, place])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": True}, {"value_dim": 64}], ids=str)
def test_fixed_order_of_plain_products_does_not_depend_on_the_width(options: dict[str, Any]) -> None:
    """More than SDPA gives: the last of ``width`` queries is the same for every width."""
    case = make(rows=1, width=9, per_group=1, dim=32, capacity=2 * BLOCK, starts=[BLOCK - 4], **options)
    last = []
    for width in range(1, 10):
        part = Case(case.q[:, -width:], *case.arguments[1:4], case.positions[:, -width:], case.scale, case.options)
        last.append(part.through(OPS["attention_fixed_order"])[:, -1])
    assert all(torch.equal(result, last[0]) for result in last)


# --- what is not built ---------------------------------------------------------------------------

named_too = pytest.mark.parametrize("op", [*OPS.values(), reference], ids=[*OPS, "reference"])


@named_too
@pytest.mark.parametrize("option", ["window", "chunk"])
def test_a_query_sees_itself_at_least(op: Any, option: str) -> None:
    with pytest.raises(RuntimeError, match=f"speccompile::attention needs a {option} of at least 1, not 0"):
        op(*make().arguments, **{option: 0})


def test_the_schema_names_every_option() -> None:
    required = ["q", "k_cache", "v_cache", "slots", "positions", "scale"]
    for name, op in OPS.items():
        names = [argument.name for argument in op.default._schema.arguments]
        alibi = [] if name == "native_attention" else ["alibi"]
        assert names == [*required, "window", "chunk", "softcap", "sinks", "parents", "pages", *alibi]
        assert not op.default._schema.is_mutable

"""The attention ops against their definition, and what they promise about the order of reduction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.lowering.ops.attention import BLOCK, reference

OPS = {
    "attention": torch.ops.speccompile.attention,
    "attention_fixed_order": torch.ops.speccompile.attention_fixed_order,
}
# Half a unit in the last place of the result's dtype, times a few for the softmax in between.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}

named = pytest.mark.parametrize("op", OPS.values(), ids=OPS)


@dataclass
class Case:
    """Arguments of one call."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k_cache, self.v_cache, self.slots, self.positions, self.scale


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
    seed: int = 0,
    scale: float | None = None,
) -> Case:
    """Rows in shuffled slots, each at positions of its own, in a cache that is full of other things."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if starts is None:
        starts = torch.randint(capacity - width + 1, (rows,), generator=generator).tolist()
    return Case(
        q=real(rows, width, groups * per_group, dim),
        k_cache=real(rows + 1, capacity, groups, dim),
        v_cache=real(rows + 1, capacity, groups, value_dim or dim),
        slots=torch.randperm(rows + 1, generator=generator)[:rows],
        positions=torch.tensor(starts)[:, None] + torch.arange(width),
        scale=dim**-0.5 if scale is None else scale,
    )


# --- the definition ------------------------------------------------------------------------------


def by_hand(case: Case) -> torch.Tensor:
    """Every query on its own, in plain loops: what the reference has to say too."""
    rows, width, heads, _ = case.q.shape
    out = torch.empty(rows, width, heads, case.v_cache.shape[3], dtype=torch.float64)
    for row in range(rows):
        for place in range(width):
            seen = int(case.positions[row, place]) + 1
            for head in range(heads):
                group = head // (heads // case.k_cache.shape[2])
                keys = case.k_cache[case.slots[row], :seen, group].double()
                values = case.v_cache[case.slots[row], :seen, group].double()
                weights = (keys @ case.q[row, place, head].double() * case.scale).softmax(0)
                out[row, place, head] = weights @ values
    return out


def test_the_reference_is_attention_over_a_rows_own_past() -> None:
    for case in (make(seed=1), make(seed=2, groups=1, per_group=3, value_dim=5), make(seed=3, rows=3, width=1)):
        torch.testing.assert_close(reference(*case.arguments).double(), by_hand(case), rtol=1e-6, atol=1e-6)


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
@given(shapes)
def test_both_ops_are_the_reference(fields: dict[str, Any]) -> None:
    case = make(**fields)
    expected = reference(*case.arguments)
    tolerance = TOLERANCE[case.q.dtype]
    for op in OPS.values():
        got = op(*case.arguments)
        assert got.dtype is expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@named
@pytest.mark.parametrize("capacity", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 60])
def test_long_caches_and_the_edges_of_blocks(op: Any, capacity: int) -> None:
    edges = [place for place in (0, BLOCK - 2, BLOCK - 1, BLOCK, 2 * BLOCK - 1) if place + 2 <= capacity]
    starts = [*edges, capacity - 2]
    case = make(rows=len(starts), width=2, capacity=capacity, starts=starts)
    torch.testing.assert_close(op(*case.arguments), reference(*case.arguments), rtol=2e-5, atol=2e-5)


@named
def test_the_cache_is_read_only(op: Any) -> None:
    case = make()
    before = [tensor.clone() for tensor in case.arguments[:-1]]
    op(*case.arguments)
    assert all(torch.equal(a, b) for a, b in zip(before, case.arguments[:-1], strict=True))


@named
def test_transposed_queries_are_fine(op: Any) -> None:
    """Models hand queries over as a view ``[B, H, T, D]`` turned round."""
    case = make(rows=2, width=5)
    turned = case.q.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned.is_contiguous()
    torch.testing.assert_close(op(turned, *case.arguments[1:]), op(*case.arguments))


@named
@pytest.mark.parametrize("width", [1, 4])
def test_opcheck(op: Any, width: int) -> None:
    case = make(width=width, value_dim=16)
    # Neither op has a gradient, and none is asked for.
    torch.library.opcheck(
        op.default, case.arguments, test_utils=("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    )


# --- what a result may depend on -----------------------------------------------------------------


@named
@settings(deadline=None, max_examples=25)
@given(rows=st.integers(2, 5), width=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_neighbours_and_dead_keys_do_not_matter(op: Any, rows: int, width: int, seed: int) -> None:
    """Bit for bit: other rows' queries, positions and caches, and what a row's own cache holds behind its queries."""
    case, other = make(rows=rows, width=width, seed=seed), make(rows=rows, width=width, seed=seed + 1)
    row = seed % rows
    slot, last = int(case.slots[row]), int(case.positions[row, -1])
    expected = op(*case.arguments)[row]
    for changed, fresh in ((case.k_cache, other.k_cache), (case.v_cache, other.v_cache)):
        mine = changed[slot, : last + 1].clone()
        changed.copy_(fresh * 100)
        changed[slot, : last + 1] = mine
    for changed, fresh in ((case.q, other.q), (case.positions, other.positions)):
        mine = changed[row].clone()
        changed.copy_(fresh)
        changed[row] = mine
    assert torch.equal(op(*case.arguments)[row], expected)


@settings(deadline=None, max_examples=25)
@given(
    width=st.integers(1, 8),
    # Around the edges of blocks a row's last query may need one block more than this one.
    target=st.sampled_from([8, 30, BLOCK - 4, BLOCK - 1, BLOCK, BLOCK + 5, 2 * BLOCK - 2]),
    dim=st.sampled_from([16, 64]),
    dtype=st.sampled_from(list(TOLERANCE)),
    capacity=st.sampled_from([3 * BLOCK, 2 * BLOCK + 77]),
    seed=st.integers(0, 10**6),
)
def test_fixed_order_does_not_depend_on_the_place(
    width: int, target: int, dim: int, dtype: torch.dtype, capacity: int, seed: int
) -> None:
    """One query over one past, as each of the ``width`` queries of each row, in every slot: bit for bit the same."""
    rows = 2
    base = make(rows=rows, width=width, dim=dim, capacity=capacity, dtype=dtype, seed=seed)
    query = base.q[0, 0].clone()
    keys, values = base.k_cache[0, : target + 1].clone(), base.v_cache[0, : target + 1].clone()
    results = []
    for row in range(rows):
        for place in range(width):
            case = make(
                rows=rows,
                width=width,
                dim=dim,
                capacity=capacity,
                dtype=dtype,
                seed=seed + 1 + row * width + place,
                starts=[target - place if r == row else (7 * r + place) % 20 for r in range(rows)],
            )
            case.q[row, place] = query
            case.k_cache[case.slots[row], : target + 1] = keys
            case.v_cache[case.slots[row], : target + 1] = values
            results.append(OPS["attention_fixed_order"](*case.arguments)[row, place])
    assert all(torch.equal(result, results[0]) for result in results)


# --- what is not built ---------------------------------------------------------------------------

UNBUILT = {
    "window": 4,
    "softcap": 30.0,
    "sinks": torch.zeros(4),
    "parents": torch.zeros(2, 3, dtype=torch.int64),
}


@pytest.mark.parametrize("option", UNBUILT)
@pytest.mark.parametrize("op", [*OPS.values(), reference], ids=[*OPS, "reference"])
def test_options_without_a_kernel_are_refused(op: Any, option: str) -> None:
    with pytest.raises(RuntimeError, match=f"speccompile::attention has no kernel for {option} yet"):
        op(*make().arguments, **{option: UNBUILT[option]})


def test_the_schema_names_every_option() -> None:
    for op in OPS.values():
        names = [argument.name for argument in op.default._schema.arguments]
        assert names == ["q", "k_cache", "v_cache", "slots", "positions", "scale", *UNBUILT]
        assert not op.default._schema.is_mutable

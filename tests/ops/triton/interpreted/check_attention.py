"""The attention kernels against the op's reference, under triton's interpreter (run by test_interpreted.py)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from speccompile.ops.attention import reference
from speccompile.ops.kv_rows import features_of, from_rows, to_rows
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.ops.triton.attention import attention, attention_launches
from speccompile.ops.triton.attention_call import AttentionCall
from speccompile.ops.triton.attention_plan import AttentionPlan, plan_attention, workspace_size
from speccompile.ops.triton.launch import run_all
from support import triton_interpreter  # noqa: F401

# As for the other kernels of the op; scores are of unit size.
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """Arguments of one call; ``options`` are those that have a default."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    slots: torch.Tensor
    positions: torch.Tensor
    scale: float
    options: dict[str, Any] = field(default_factory=dict)

    def reference(self) -> torch.Tensor:
        return reference(self.q, self.k_cache, self.v_cache, self.slots, self.positions, self.scale, **self.options)

    def run(self, queries: int = 16, keys: int = 16, blocks: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
        """The result and the stats ``[2, B, splits, T, H]`` that partial results left (NaN where nothing was); of one
        split there are none."""
        rows, width, heads, _ = self.q.shape
        capacity, groups = self.v_cache.shape[1:3]
        value_dim = features_of(self.v_cache)
        tiles = -(-width * heads // groups // queries)
        plan = AttentionPlan(queries, keys, blocks, tiles, -(-capacity // (keys * blocks)), warps=4, stages=2)
        workspace = torch.full((workspace_size(plan, rows, width, heads, value_dim),), torch.nan)
        out = torch.full((rows, width, heads, value_dim), torch.nan, dtype=self.q.dtype)
        tensors = self.q, self.k_cache, self.v_cache, self.slots, self.positions, self.scale
        call = AttentionCall(*tensors, **self.options)
        run_all(attention_launches(call, out=out, workspace=workspace, plan=plan), self.q)
        stats = workspace[out.numel() * plan.splits :]
        return out, stats if plan.splits == 1 else stats.view(2, rows, plan.splits, width, heads)


def random_parents(rows: int, width: int, generator: torch.Generator) -> torch.Tensor:
    parents = [
        [-1] + [int(torch.randint(node, (), generator=generator)) for node in range(1, width)] for _ in range(rows)
    ]
    return torch.tensor(parents)


def depths(parents: torch.Tensor) -> torch.Tensor:
    found = torch.zeros_like(parents)
    for node in range(1, parents.shape[1]):
        found[:, node] = found.gather(1, parents[:, node : node + 1])[:, 0] + 1
    return found


def make(
    *,
    rows: int = 2,
    width: int = 3,
    groups: int = 2,
    per_group: int = 2,
    dim: int = 8,
    value_dim: int | None = None,
    capacity: int = 40,
    starts: list[int] | None = None,
    dtype: torch.dtype = torch.float32,
    cached: torch.dtype | None = None,
    seed: int = 0,
    sinks: bool = False,
    tree: bool = False,
    **options: Any,
) -> Case:
    """Rows in shuffled slots, each at places of its own, in a cache that is NaN wherever no query of its row looks."""
    generator = torch.Generator().manual_seed(seed)

    def real(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    if starts is None:
        starts = torch.randint(capacity - width + 1, (rows,), generator=generator).tolist()
    root = torch.tensor(starts)[:, None]
    positions = root + torch.arange(width)
    if sinks:
        options["sinks"] = 2 * real(groups * per_group)
    if tree:
        options["parents"] = random_parents(rows, width, generator)
        positions = root + depths(options["parents"])
    slots = torch.randperm(rows + 1, generator=generator)[:rows]
    caches = []
    for size in (dim, value_dim or dim):
        cache = torch.full((rows + 1, capacity, groups, size), torch.nan)
        for slot, start in zip(slots.tolist(), starts, strict=True):
            cache[slot, : start + width] = real(start + width, groups, size).float()
        caches.append(to_rows(cache, cached or dtype))
    # A view as models hand it over.
    q = real(rows, groups * per_group, width, dim).transpose(1, 2)
    return Case(q, caches[0], caches[1], slots, positions, dim**-0.5, options)


def no_shrinking(examples: int) -> settings:
    """Under the interpreter it takes minutes."""
    return settings(deadline=None, max_examples=examples, phases=[Phase.explicit, Phase.generate])


asked = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(1, 40),
        "chunk": st.integers(1, 40),
        "softcap": st.sampled_from([0.5, 5.0, 50.0]),
        "sinks": st.just(True),
        "alibi": st.just(True),
        "tree": st.just(True),
    },
)
shapes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "width": st.integers(1, 9),
        "groups": st.integers(1, 2),
        "per_group": st.integers(1, 5),
        "dim": st.sampled_from([4, 16, 24, 80]),
        "value_dim": st.sampled_from([None, 8, 96]),
        "capacity": st.integers(9, 90),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "cached": st.sampled_from([None, *TOLERANCE, torch.int8]),
        "seed": st.integers(0, 10**6),
    }
)
plans = st.fixed_dictionaries(
    {"queries": st.sampled_from([16, 32]), "keys": st.sampled_from([16, 32]), "blocks": st.integers(1, 3)}
)


def assert_close(got: torch.Tensor, case: Case) -> None:
    expected = case_without_nan(case).reference()
    assert got.dtype is expected.dtype and got.shape == expected.shape
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


def case_without_nan(case: Case) -> Case:
    """The reference multiplies hidden values by 0 instead of leaving them out."""
    caches = case.k_cache, case.v_cache
    keys, values = (to_rows(from_rows(cache, torch.float32).nan_to_num(), cache.dtype) for cache in caches)
    return replace(case, k_cache=keys, v_cache=values)


@no_shrinking(12)
@given(shapes, asked, plans)
def test_the_kernels_are_the_reference(fields: dict[str, Any], options: dict[str, Any], plan: dict[str, int]) -> None:
    case = make(**fields, **options)
    assert_close(case.run(**plan)[0], case)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("dim", [16, 80])
def test_keys_and_values_of_8_bits(dim: int, dtype: torch.dtype) -> None:
    case = make(dim=dim, value_dim=64, dtype=dtype, cached=torch.int8, tree=dim == 80, width=5)
    assert_close(case.run(keys=32)[0], case)


@pytest.mark.parametrize(
    ("dtype", "fixed_order"),
    [(torch.float32, False), (torch.float32, True), (torch.float16, True), (torch.bfloat16, False)],
    ids=str,
)
def test_the_launcher_with_plans_of_its_own(dtype: torch.dtype, fixed_order: bool) -> None:
    """Three splits, the borders of blocks among them."""
    case = make(rows=3, starts=[0, 126, 297], width=6, per_group=3, dim=64, capacity=300 + 3, dtype=dtype, window=130)
    arguments = case.q, case.k_cache, case.v_cache, case.slots, case.positions, case.scale
    assert_close(attention(*arguments, **case.options, fixed_order=fixed_order), case)


@pytest.mark.parametrize(
    "options",
    [{}, {"sinks": True}, {"window": 7, "softcap": 5.0}, {"tree": True, "sinks": True, "alibi": True}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_split_needs_no_workspace_and_one_launch(options: dict[str, Any], dtype: torch.dtype) -> None:
    """In bits it is what the combining kernel makes of one split that holds all live keys."""
    case = make(rows=3, starts=[0, 9, 23], width=6, per_group=3, dim=24, capacity=64, dtype=dtype, **options)
    whole, stats = case.run(blocks=4)
    assert_close(whole, case)
    assert stats.numel() == 0
    longer = [
        torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, 64), value=torch.nan) for cache in (case.k_cache, case.v_cache)
    ]
    split, stats = replace(case, k_cache=longer[0], v_cache=longer[1]).run(blocks=4)
    assert stats.shape[2] == 2 and torch.equal(whole, split)


@pytest.mark.parametrize("options", [{}, {"window": 7}, {"chunk": 9, "sinks": True}], ids=str)
def test_a_chain_is_a_tree(options: dict[str, Any]) -> None:
    case = make(width=5, **options)
    parents = torch.arange(-1, 4).expand(2, 5)
    assert torch.equal(case.run()[0], replace(case, options=case.options | {"parents": parents.contiguous()}).run()[0])


def test_a_path_of_a_tree_is_its_chain() -> None:
    """The definition itself: a node's result is that of a row that holds its path alone."""
    case = make(rows=1, width=6, starts=[21], window=20, alibi=True)
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4]])
    tree = replace(case, positions=21 + depths(parents), options=case.options | {"parents": parents})
    path = [0, 2, 4, 5]
    chain = replace(case, q=case.q[:, path], positions=21 + torch.arange(4)[None])
    for cache in (chain.k_cache, chain.v_cache):
        assert not cache[case.slots[0], 21:27].isnan().any()
    moved = [cache.clone() for cache in (case.k_cache, case.v_cache)]
    for cache in moved:
        cache[case.slots[0], 21:25] = cache[case.slots[0], [21 + node for node in path]]
    chain = replace(chain, k_cache=moved[0], v_cache=moved[1])
    for result in (lambda c: case_without_nan(c).reference(), lambda c: c.run()[0]):
        torch.testing.assert_close(result(tree)[:, path], result(chain), rtol=1e-5, atol=1e-5)


def test_programs_that_nothing_is_seen_of_leave_no_trace() -> None:
    """What a step costs follows what is seen: splits after a row's end, and before its window, do not run."""
    case = make(rows=3, starts=[0, 30, 77], width=2, capacity=80, window=20)
    _, stats = case.run(keys=16, blocks=1)
    ran = ~stats.isnan().all(-1).all(-1)
    assert torch.equal(ran[0], ran[1])
    assert ran[0].tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 0, 1, 1]]


def product_by_rows(self: InterpreterBuilder, a: Any, b: Any, d: Any, *_: Any) -> TensorHandle:
    """As on a GPU, and unlike BLAS: each row of a product is computed alike, whatever the others are."""
    summed = np.add.reduce(a.data.astype(np.float32)[:, :, None] * b.data.astype(np.float32)[None], axis=1)
    return TensorHandle(summed + d.data, d.dtype.scalar)


@no_shrinking(3)
@given(
    per_group=st.sampled_from([1, 3, 4]),
    target=st.integers(8, 60),
    width=st.integers(2, 6),
    dtype=st.sampled_from(list(TOLERANCE)),
    seed=st.integers(0, 10**6),
    options=asked.map(lambda options: {name: options[name] for name in options if name not in ("tree", "sinks")}),
)
def test_fixed_order(
    per_group: int, target: int, width: int, dtype: torch.dtype, seed: int, options: dict[str, Any]
) -> None:
    """One query over one past, at any place of a step of any width, in any slot: bit for bit the same."""
    sizes: dict[str, Any] = {"groups": 1, "per_group": per_group, "capacity": 70, "dim": 16, "dtype": dtype}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", product_by_rows)
        alone = make(rows=1, width=1, starts=[target], seed=seed, **sizes, **options)
        expected = alone.run()[0][0, 0]
        for place in range(width):
            case = make(rows=2, width=width, starts=[target - place, 3], seed=seed + 1 + place, **sizes, **options)
            case.q[0, place] = alone.q[0, 0]
            for mine, theirs in ((case.k_cache, alone.k_cache), (case.v_cache, alone.v_cache)):
                mine[case.slots[0], : target + 1] = theirs[alone.slots[0], : target + 1]
            assert torch.equal(case.run()[0][0, place], expected)


def test_a_plan_of_fixed_order_knows_neither_rows_nor_width() -> None:
    for dtype in TOLERANCE:
        sizes = {"heads": 12, "groups": 4, "dim": 64, "value_dim": 64, "capacity": 5000, "dtype": dtype}
        plans = [
            plan_attention(rows, width, **sizes, fixed_order=True) for rows in (1, 2, 7, 64) for width in (1, 3, 8, 64)
        ]
        assert len({replace(plan, tiles=0) for plan in plans}) == 1


@pytest.mark.parametrize("fixed_order", [False, True])
def test_what_the_ops_are_on_cuda(fixed_order: bool) -> None:
    """What is registered there is called as the dispatcher calls it: options in their order, without a name."""
    case = make(rows=1, width=4, starts=[30], window=5)
    arguments = case.q, case.k_cache, case.v_cache, case.slots, case.positions, case.scale
    op = torch.ops.speccompile.attention_fixed_order if fixed_order else torch.ops.speccompile.attention
    kernel = cuda_kernel(op.default)
    assert kernel is not None
    got = kernel(*arguments, 5, None, 2.0)
    assert_close(got, replace(case, options={"window": 5, "softcap": 2.0}))
    for name in ("attention", "attention_fixed_order"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(f"speccompile::{name}", "CUDA")


def test_other_dtypes_are_refused() -> None:
    case = make(dtype=torch.float32)
    with pytest.raises(RuntimeError, match=r"accepts queries in .*, and keys and values of one of"):
        attention(case.q.double(), case.k_cache, case.v_cache, case.slots, case.positions, case.scale)
    with pytest.raises(RuntimeError, match=re.escape("not torch.float32, torch.float16 and torch.float32")):
        attention(case.q, case.k_cache.half(), case.v_cache, case.slots, case.positions, case.scale)
    with pytest.raises(RuntimeError, match="last dimension is contiguous"):
        attention(case.q, case.k_cache[..., ::2], case.v_cache, case.slots, case.positions, case.scale)
    with pytest.raises(RuntimeError, match="needs a window of at least 1, not 0"):
        attention(case.q, case.k_cache, case.v_cache, case.slots, case.positions, case.scale, window=0)


@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("blocks", [1, 4])
def test_pages_of_a_pool_have_the_bits_of_one_piece(tree: bool, blocks: int) -> None:
    """The page of a block is its slot's own; pages of no slot are NaN."""
    case = make(rows=3, width=4, capacity=96, starts=[3, 45, 92], tree=tree, seed=blocks)
    size, slots = 32, len(case.k_cache)
    count = case.k_cache.shape[1] // size
    table = torch.randperm(slots * count + 2, generator=torch.Generator().manual_seed(1))[: slots * count]
    pools = []
    for cache in (case.k_cache, case.v_cache):
        pool = torch.full((slots * count + 2, size, *cache.shape[2:]), torch.nan)
        pool[table] = cache.unflatten(1, (-1, size)).flatten(0, 1)
        pools.append(pool)
    tensors = pools[0], pools[1], case.slots, case.positions, case.scale
    call = AttentionCall(case.q, *tensors, **case.options, pages=table.view(slots, count))
    plan = AttentionPlan(16, 16, blocks, 1, -(-96 // (16 * blocks)), warps=4, stages=2)
    rows, width, heads, dim = case.q.shape
    out = torch.full((rows, width, heads, dim), torch.nan)
    workspace = torch.full((workspace_size(plan, rows, width, heads, dim),), torch.nan)
    run_all(attention_launches(call, out=out, workspace=workspace, plan=plan), case.q)
    assert torch.equal(out, case.run(blocks=blocks)[0])

"""Attention of the nodes of trees: the definition's results, and the bits of a chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.ops.native  # noqa: F401  defines an op
from speccompile.ops.attention import reference
from speccompile.ops.cpu.library import load_cpu_ops

assert load_cpu_ops() is None

OPS = {"attention": torch.ops.speccompile.attention, "native_attention": torch.ops.speccompile.native_attention}
NATIVE = OPS["native_attention"]
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
#: Keys of a block of the C++ kernel.
BLOCK = 128

named = pytest.mark.parametrize("op", OPS.values(), ids=OPS)

#: Parents of the nodes after node 0; -1 of further roots.
trees = st.integers(0, 12).flatmap(lambda nodes: st.tuples(*(st.integers(-1, node) for node in range(nodes))))
asked = st.fixed_dictionaries(
    {},
    optional={
        "window": st.integers(1, 12),
        "chunk": st.integers(1, 12),
        "softcap": st.sampled_from([0.5, 5.0]),
        "sinks": st.just(True),
    },
)
sizes = st.fixed_dictionaries(
    {
        "rows": st.integers(1, 3),
        "groups": st.integers(1, 2),
        "per_group": st.integers(1, 3),
        "dim": st.sampled_from([4, 16]),
        "value_dim": st.sampled_from([4, 16]),
        "dtype": st.sampled_from(list(TOLERANCE)),
        "cached": st.sampled_from([None, *TOLERANCE]),
        "seed": st.integers(0, 10**6),
    }
)
roots = st.one_of(st.integers(0, 20), st.integers(BLOCK - 5, BLOCK + 2), st.integers(2 * BLOCK - 3, 2 * BLOCK))


def depths(parents: tuple[int, ...]) -> list[int]:
    found = [0]
    for parent in parents:
        found.append(found[parent] + 1 if parent >= 0 else 0)
    return found


def path_to(node: int, parents: tuple[int, ...]) -> list[int]:
    """From the node's root on."""
    found = [node]
    while (parent := (-1, *parents)[found[-1]]) >= 0:
        found.append(parent)
    return found[::-1]


class Trees:
    """Rows of one tree, each at a root and in its own slot, in a cache that is full of other things."""

    def __init__(
        self,
        parents: tuple[int, ...],
        root: int,
        *,
        rows: int = 2,
        groups: int = 2,
        per_group: int = 2,
        dim: int = 8,
        value_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        cached: torch.dtype | None = None,
        seed: int = 0,
        sinks: bool = False,
        **options: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)

        def real(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        width = len(parents) + 1
        self.tree = parents
        self.roots = [root, *range(3, 3 + rows - 1)]
        capacity = max(self.roots) + width + 1
        self.q = real(rows, width, groups * per_group, dim)
        self.k_cache, self.v_cache = (
            real(rows + 1, capacity, groups, size).to(cached or dtype) for size in (dim, value_dim)
        )
        self.slots = torch.randperm(rows + 1, generator=generator)[:rows]
        self.positions = torch.tensor(self.roots)[:, None] + torch.tensor(depths(parents))
        self.parents = torch.tensor([(-1, *parents)]).repeat(rows, 1)
        self.options = options | ({"sinks": 2 * real(groups * per_group)} if sinks else {})

    @property
    def arguments(self) -> tuple[Any, ...]:
        return self.q, self.k_cache, self.v_cache, self.slots, self.positions, 0.3

    def through(self, op: Any) -> torch.Tensor:
        return op(*self.arguments, parents=self.parents, **self.options)

    def as_chain(self, op: Any, row: int, node: int) -> torch.Tensor:
        """The result of a node, computed in a chain of the tokens on its path."""
        path, root = path_to(node, self.tree), self.roots[row]
        caches = [cache.clone() for cache in (self.k_cache, self.v_cache)]
        slot = int(self.slots[row])
        for cache, own in zip(caches, (self.k_cache, self.v_cache), strict=True):
            cache[slot, root : root + len(path)] = own[slot, [root + on_path for on_path in path]]
        positions = torch.arange(root, root + len(path))[None]
        return op(self.q[row, path][None], *caches, self.slots[row : row + 1], positions, 0.3, **self.options)[0, -1]


@settings(deadline=None, max_examples=120)
@given(trees, roots, sizes, asked)
def test_the_ops_are_the_reference(
    parents: tuple[int, ...], root: int, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    case = Trees(parents, root, **fields, **options)
    expected = case.through(reference)
    for op in OPS.values():
        got = case.through(op)
        assert got.dtype is expected.dtype and got.shape == expected.shape
        torch.testing.assert_close(got, expected, rtol=TOLERANCE[fields["dtype"]], atol=TOLERANCE[fields["dtype"]])


@settings(deadline=None, max_examples=80)
@given(trees, roots, sizes, asked)
def test_a_node_has_the_bits_of_a_chain(
    parents: tuple[int, ...], root: int, fields: dict[str, Any], options: dict[str, Any]
) -> None:
    case = Trees(parents, root, **fields, **options)
    found = case.through(NATIVE)
    for row in range(fields["rows"]):
        for node in range(len(parents) + 1):
            assert torch.equal(found[row, node], case.as_chain(NATIVE, row, node))


@pytest.mark.parametrize("root", [5, BLOCK - 2, 3 * BLOCK + 7])
def test_a_chain_written_as_a_tree_has_its_bits(root: int) -> None:
    case = Trees(tuple(range(7)), root, window=40)
    chain = NATIVE(*case.arguments, **case.options)
    assert torch.equal(case.through(NATIVE), chain)


@pytest.mark.parametrize("garbage", [float("nan"), float("inf")])
def test_siblings_and_dead_positions_are_not_read(garbage: float) -> None:
    case = Trees((0, 0, 1), BLOCK - 2, rows=1)
    expected, slot, root = case.through(NATIVE)[0, 3], int(case.slots[0]), case.roots[0]
    for cache in (case.k_cache, case.v_cache):
        dead = torch.ones(cache.shape[:2], dtype=torch.bool)
        dead[slot, : root + 1] = dead[slot, [root + 1, root + 3]] = False
        cache[dead] = garbage
    assert torch.equal(case.through(NATIVE)[0, 3], expected)


@pytest.mark.parametrize("parents", [[-1, 1, 0], [-1, 0, 2], [0, 0, 1], [-1, -2, 0], [-1, 0, 7]])
def test_what_is_no_tree_is_refused(parents: list[int]) -> None:
    case = Trees((0, 1), 4, rows=1)
    with pytest.raises(RuntimeError, match="has the parent"):
        NATIVE(*case.arguments, parents=torch.tensor([parents]))


def test_a_second_root_is_where_the_first_is() -> None:
    case = Trees((0, 1), 4, rows=1)
    with pytest.raises(RuntimeError, match="node 1 is at position 5"):
        NATIVE(*case.arguments, parents=torch.tensor([[-1, -1, 1]]))


def test_positions_that_are_no_depths_are_refused() -> None:
    case = Trees((0, 1), 4, rows=1)
    case.positions[0, 2] += 1
    with pytest.raises(RuntimeError, match="node 2 is at position 7"):
        case.through(NATIVE)


def test_parents_of_another_shape_are_refused() -> None:
    case = Trees((0, 1), 4)
    with pytest.raises(RuntimeError, match="another shape"):
        NATIVE(*case.arguments, parents=case.parents[:1])


def test_the_op_of_one_shape_has_no_trees() -> None:
    # Its products would depend on the number of nodes.
    with pytest.raises(RuntimeError, match="no kernel for parents"):
        Trees((0, 0), 4).through(torch.ops.speccompile.attention_fixed_order)


@named
@pytest.mark.parametrize(
    "options", [{}, {"window": 3, "chunk": 4, "softcap": 2.0, "sinks": True}], ids=["plain", "all"]
)
def test_opcheck(op: Any, options: dict[str, Any]) -> None:
    case = Trees((0, 0, 2), 6, **options)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op.default, case.arguments, {**case.options, "parents": case.parents}, test_utils=checks)

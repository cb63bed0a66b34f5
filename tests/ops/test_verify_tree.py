"""Comparison of the C++ ops of the verify side of trees with the functions that other devices run."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.define import reference_of
from speccompile.ops.draft_rows import form_of
from speccompile.ops.tree import walk_tree
from speccompile.ops.verify_tree import judge_chain_, newest_and_nodes, rows_on_path, tokens_on_path

SLOTS, CAPACITY = 5, 12
IN_CPP = {"linears_fused"}
ops = torch.ops.speccompile


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def integers(*size: int, low: int = 0, high: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(low, high, size, generator=generator)


def laid_out(values: torch.Tensor, strided: bool) -> torch.Tensor:
    """``values`` as they are, or ``strided``: with other numbers between them."""
    return torch.stack([values, values + 1], -1)[..., 0] if strided else values.contiguous()


def trees(rows: int, nodes: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Drafts ``[B, nodes]``, parents and depths ``[B, 1 + nodes]`` of any trees. Some nodes have no draft, and some
    siblings have the same one."""
    rng, drafts, parents, depths = random.Random(seed), [], [], []
    for _ in range(rows):
        above = [-1, *(rng.randrange(node) for node in range(1, nodes + 1))]
        deep = [0]
        for node in range(1, nodes + 1):
            deep.append(deep[above[node]] + 1)
        parents.append(above)
        depths.append(deep)
        drafts.append([rng.choice([-1, 0, 1, 2, 3]) for _ in range(nodes)])
    return torch.tensor(drafts), torch.tensor(parents), torch.tensor(depths)


def assert_same(function: Callable[..., Any], *arguments: Any) -> None:
    made, expected = form_of(function, IN_CPP)(*arguments), function(*arguments)
    several = isinstance(expected, tuple)
    for one, other in zip(made, expected, strict=True) if several else [(made, expected)]:
        assert one.dtype is other.dtype and torch.equal(one, other) and one.is_contiguous()


@settings(max_examples=100, deadline=None)
@given(rows=st.integers(1, 3), nodes=st.integers(1, 6), strided=st.booleans(), seed=st.integers(0, 2**30))
def test_newest_and_nodes(rows: int, nodes: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    tokens = integers(SLOTS, CAPACITY, high=99, generator=generator)
    length = integers(SLOTS, high=CAPACITY + 1, generator=generator)
    slots = laid_out(torch.randperm(SLOTS, generator=generator)[:rows], strided)
    # Drafts from 3 on are not in the vocabulary.
    drafts, _, depths = trees(rows, nodes, seed)
    assert_same(newest_and_nodes, tokens, length, slots, laid_out(drafts, strided), laid_out(depths, strided), 3)


def test_results_have_memory_of_their_own() -> None:
    drafts, _, depths = trees(1, 3, 0)
    tokens, length = torch.ones((1, 9), dtype=torch.int64), torch.tensor([4])
    given = (tokens, length, torch.tensor([0]), drafts, depths, 9)
    definition = reference_of(ops.newest_and_nodes.default)
    assert definition is not None
    for function in (ops.newest_and_nodes, definition):
        assert len({result.untyped_storage().data_ptr() for result in function(*given)}) == 4


@settings(max_examples=100, deadline=None)
@given(
    rows=st.integers(1, 3),
    nodes=st.integers(1, 6),
    width=st.integers(1, 5),
    form=st.sampled_from([(torch.float32, (6,)), (torch.bfloat16, (5,)), (torch.float16, (2, 3)), (torch.int64, ())]),
    strided=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_rows_on_path(
    rows: int, nodes: int, width: int, form: tuple[torch.dtype, tuple[int, ...]], strided: bool, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    dtype, sizes = form
    values = laid_out((torch.randn(rows, nodes, *sizes, generator=generator) * 9).to(dtype), strided)
    path = laid_out(integers(rows, width, high=nodes, generator=generator), strided)
    assert_same(rows_on_path, values, path)
    if dtype is torch.int64:
        assert_same(tokens_on_path, values, path)


@settings(max_examples=300, deadline=None)
@given(
    rows=st.integers(1, 3),
    nodes=st.integers(1, 8),
    depth=st.integers(1, 6),
    strided=st.booleans(),
    seed=st.integers(0, 2**30),
)
def test_judge_chain(rows: int, nodes: int, depth: int, strided: bool, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    drafts, parents, depths = trees(rows, nodes, seed)
    target = integers(rows, nodes + 1, high=4, generator=generator)
    path, accepted = walk_tree(target, drafts, parents, depth)
    others = tuple(node for node in range(1, nodes + 1) if not int(integers(1, high=5, generator=generator)))
    slots = torch.randperm(SLOTS, generator=generator)[:rows]
    read = [laid_out(tensor, strided) for tensor in (drafts, parents, depths, path, accepted, slots)]
    found = []
    for facts in (IN_CPP, set()):
        state = [torch.full((SLOTS,), 77) for _ in range(3)]
        form_of(judge_chain_, facts)(*read, *state, others)
        found.append(torch.stack(state))
    assert torch.equal(*found)
    assert int((found[0] == 77).sum()) == 3 * (SLOTS - rows)


def test_steps_on_torchs_own_kernels_run_the_functions() -> None:
    for function in (newest_and_nodes, tokens_on_path, rows_on_path, judge_chain_):
        assert form_of(function, set()) is function
        assert form_of(function, IN_CPP) is getattr(ops, function.__name__)


def test_sizes_that_do_not_fit_are_refused() -> None:
    one, (drafts, parents, depths) = torch.zeros(1, dtype=torch.int64), trees(1, 3, 0)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.newest_and_nodes(one[None], one, one, drafts, depths[:, 1:], 9)
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.rows_on_path(torch.zeros(2, 3, 4), one[None])
    with pytest.raises(RuntimeError, match="sizes do not fit"):
        ops.judge_chain_(drafts, parents[:, 1:], depths, depths, one, one, one, one, one, ())


@pytest.mark.parametrize("outside", [-1, 4])
def test_slots_and_nodes_outside_are_refused(outside: int) -> None:
    one, there = torch.zeros(1, dtype=torch.int64), torch.tensor([outside])
    drafts, parents, depths = torch.tensor([[5, 5, 5]]), torch.tensor([[-1, 0, 1, 2]]), torch.tensor([[0, 1, 2, 3]])
    with pytest.raises(RuntimeError, match=f"no slot {outside}"):
        ops.newest_and_nodes(one[None], one, there, drafts, depths, 9)
    with pytest.raises(RuntimeError, match=f"no node {outside}"):
        ops.rows_on_path(torch.zeros(1, 4, 2), there[None])
    with pytest.raises(RuntimeError, match=f"no node {outside}"):
        ops.tokens_on_path(depths, there[None])
    state = [torch.zeros(2, dtype=torch.int64) for _ in range(3)]
    with pytest.raises(RuntimeError, match=f"no slot {outside}"):
        ops.judge_chain_(drafts, parents, depths, depths, one, there, *state, ())
    with pytest.raises(RuntimeError, match=f"no node {outside}"):
        ops.judge_chain_(drafts, parents, depths, depths, one, one, *state, (outside,))
    with pytest.raises(RuntimeError, match="no node 4"):
        ops.judge_chain_(drafts, parents, depths, torch.tensor([[0, 4]]), one + 1, one, *state, ())
    with pytest.raises(RuntimeError, match="no place 3"):
        ops.newest_and_nodes(torch.zeros((1, 3), dtype=torch.int64), one + 4, one, drafts, depths, 9)

"""Ops of draft trees as kernels against the functions that define them (run by test_interpreted.py)."""

from __future__ import annotations

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from speccompile import Tree
from speccompile.ops import tree as reference
from speccompile.ops.triton import tree as kernels
from support import triton_interpreter  # noqa: F401
from support.tree_cases import proposals, shapes


@settings(deadline=None, max_examples=25, phases=[Phase.explicit, Phase.generate])
@given(st.lists(proposals, min_size=1, max_size=3), shapes, st.integers(0, 13), st.integers(0, 10**6))
def test_fit_walk_and_move(rows: list[tuple[int, ...]], tree: Tree, limit: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *map(len, rows))
    # Few tokens, so that siblings may be equal and targets are found.
    tokens = torch.randint(-1, 3, (len(rows), longest), generator=generator)
    parents = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    count, limits = torch.tensor([len(row) for row in rows]), torch.full((len(rows),), limit)
    static = (list(tree.parents or ()), list(tree.ranks or ()))
    inputs = (tokens, parents, count, limits, int(tree), tree.depth, tree.branches, *static)
    expected, found = reference.fit_tree(*inputs), kernels.fit_tree(*inputs)
    same(found, expected)
    drafts, of = expected[:2]
    target = torch.randint(-1, 3, (len(rows), tree + 1), generator=generator)
    path, accepted = reference.walk_tree(target, drafts, of, tree.depth)
    same(kernels.walk_tree(target, drafts, of, tree.depth), (path, accepted))
    kv = [torch.randn(4, 40, 2, 3, generator=generator), torch.randn(4, 40, 5, generator=generator).bfloat16()]
    slots = torch.randperm(4, generator=generator)[: len(rows)]
    root = torch.randint(0, 20, (len(rows),), generator=generator)
    moved = [tensor.clone() for tensor in kv]
    pools = [tensor.unflatten(1, (5, 8)).flatten(0, 1) for tensor in kv]
    pages = torch.randperm(20, generator=generator)
    pools = [pool[pages.argsort()].clone() for pool in pools]
    reference.move_path_(kv, slots, root, path, accepted)
    kernels.move_path(moved, slots, root, path, accepted)
    same(moved, kv)
    kernels.move_path(pools, slots, root, path, accepted, pages.view(4, 5))
    same([pool[pages].view(kept.shape) for pool, kept in zip(pools, kv, strict=True)], kv)


def test_blocks_of_a_place() -> None:
    """A place of more numbers than a program moves."""
    kv = [torch.arange(2 * 8 * 2600, dtype=torch.float32).view(2, 8, 2, 1300)]
    moved = [kv[0].clone()]
    arguments = (torch.tensor([1]), torch.tensor([2]), torch.tensor([[0, 2, 5]]), torch.tensor([2]))
    reference.move_path_(kv, *arguments)
    kernels.move_path(moved, *arguments)
    same(moved, kv)


def test_a_parent_that_comes_later_is_left_out() -> None:
    tokens, parents = torch.tensor([[5, 6, 7]]), torch.tensor([[2, 0, -1]])
    drafts, of, _, lens = kernels.fit_tree(tokens, parents, torch.tensor([3]), torch.tensor([3]), 3, 2, 2, [], [])
    assert drafts.tolist() == [[6, -1, -1]] and of[0, 1] == 0 and lens.tolist() == [1]


def same(found: object, expected: object) -> None:
    for one, other in zip(found, expected, strict=True):  # type: ignore[call-overload]
        assert one.dtype is other.dtype and torch.equal(one, other)

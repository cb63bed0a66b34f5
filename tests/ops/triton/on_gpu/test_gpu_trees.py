"""The ops of trees on a GPU equal their references."""

from __future__ import annotations

import pytest
import torch

from speccompile import Tree
from speccompile.ops import tree as tree_op
from support.gpu import on_gpu

pytestmark = pytest.mark.gpu

ops = torch.ops.speccompile


@pytest.mark.parametrize(
    "tree", [Tree.dynamic(7, 4, 3), Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])], ids=["dynamic", "static"]
)
def test_trees(tree: Tree) -> None:
    generator = torch.Generator().manual_seed(4)
    rows, proposed = 16, 12
    tokens = torch.randint(-1, 3, (rows, proposed), generator=generator)
    parents = (torch.rand((rows, proposed), generator=generator) * torch.arange(1, proposed + 1)).long()
    counts = [torch.randint(0, proposed + 2, (rows,), generator=generator) for _ in range(2)]
    static = (list(tree.parents or ()), list(tree.ranks or ()))
    wanted = tree_op.fit_tree(tokens, parents, *counts, int(tree), tree.depth, tree.branches, *static)
    there = on_gpu(tokens, parents, *counts)
    for one, other in zip(ops.fit_tree(*there, int(tree), tree.depth, tree.branches, *static), wanted, strict=True):
        assert torch.equal(one.cpu(), other)
    target = torch.randint(-1, 3, (rows, tree + 1), generator=generator)
    path, accepted = tree_op.walk_tree(target, *wanted[:2], tree.depth)
    for one, other in zip(ops.walk_tree(*on_gpu(target, *wanted[:2]), tree.depth), (path, accepted), strict=True):
        assert torch.equal(one.cpu(), other)
    kv = [torch.randn((rows, 64, *sizes), generator=generator) for sizes in ((3, 600), (2, 64))]
    kv[1] = kv[1].bfloat16()
    moved = list(on_gpu(*kv))
    where = torch.randperm(rows, generator=generator), torch.randint(0, 50, (rows,), generator=generator)
    tree_op.move_path_(kv, *where, path, accepted)
    ops.move_path_(moved, *on_gpu(*where, path, accepted))
    for one, other in zip(moved, kv, strict=True):
        assert torch.equal(one.cpu(), other)

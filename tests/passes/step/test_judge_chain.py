"""What becomes of a chain beside a tree, against a walk written down once more."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile import Tree
from speccompile.ops.tree import walk_tree
from speccompile.ops.verify_tree import chain_in_tree, deepest_draft
from speccompile.passes.step.judge_chain import other_branches


def judged(drafts: list[int], parents: list[int], target: list[int], others: tuple[int, ...]) -> tuple[int, int]:
    now = count = 0
    while True:
        children = [node for node in range(1, len(parents)) if parents[node] == now and drafts[node - 1] >= 0]
        if not children or children[0] in others:
            return count, count
        if drafts[children[0] - 1] != target[now]:
            return count, count + 1
        now, count = children[0], count + 1


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_the_chain_is_the_first_child_of_each_node(seed: int) -> None:
    rng = random.Random(seed)
    nodes, depth = rng.randrange(1, 9), 9
    parents = [-1, *(rng.randrange(node) for node in range(1, nodes + 1))]
    drafts: list[int] = []
    for node in range(1, nodes + 1):
        siblings = [drafts[other - 1] for other in range(1, node) if parents[other] == parents[node]]
        drafts.append(rng.choice([token for token in range(-1, 9) if token == -1 or token not in siblings]))
    target = [rng.choice([drafts[i - 1] for i in range(1, nodes + 1)] + [0]) for _ in range(nodes + 1)]
    others = tuple(node for node in range(1, nodes + 1) if rng.random() < 0.1)
    tensors = [torch.tensor([values]) for values in (target, drafts, parents)]
    path, accepted = walk_tree(*tensors, depth)
    found = chain_in_tree(*tensors[1:], path, accepted, others=others)
    assert [int(value) for value in found] == list(judged(drafts, parents, target, others))


def test_nodes_without_a_draft_are_not_deep() -> None:
    # Two trees of the form [(0,), (1,), (0, 0), (0, 0, 0)].
    drafts, depths = torch.tensor([[3, -1, 4, -1], [-1, -1, -1, -1]]), torch.tensor([[0, 1, 1, 2, 3]] * 2)
    assert deepest_draft(drafts, depths).tolist() == [2, 0]


def test_other_branches_of_a_static_tree() -> None:
    assert other_branches(Tree.static([(0,), (2,), (0, 1), (2, 0)])) == (2, 3)
    assert other_branches(Tree.dynamic(nodes=4, depth=2, branches=2)) == ()

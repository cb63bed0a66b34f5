"""Each node of a static tree has the draft that its path names."""

from __future__ import annotations

import re

import pytest
import torch

from speccompile import Tree, wrap
from speccompile.errors import InvalidTiers
from speccompile.heads import MedusaHeads
from speccompile.passes.step.independent_tree import chosen_nodes
from support.errors import raises
from support.tiny import tiny_llama

# Paths with a gap: nothing continues the likeliest first token, and no node is the second likeliest.
TREE = Tree.static([(0,), (2,), (2, 1), (2, 0), (2, 1, 0)])
LEVELS = [[10, 11, 12], [20, 21, 22], [30, 31, 32]]


@pytest.mark.parametrize(
    ("limit", "left", "drafts"),
    [
        (5, 90, [10, 12, 20, 21, 30]),
        (9, 4, [10, 12, 20, 21, 30]),
        (9, 3, [10, 12, 20, 21, -1]),
        (4, 90, [10, 12, 20, 21, -1]),
        (2, 90, [10, 12, -1, -1, -1]),
        (0, 90, [-1] * 5),
        (9, 1, [-1] * 5),
    ],
)
def test_a_node_has_the_choice_of_its_level(limit: int, left: int, drafts: list[int]) -> None:
    """A request that wants fewer has those of the smallest depth and branch indices, no node without its parent; no
    node is deeper than the tokens that are left."""
    choices = torch.full((3, 9), -1)
    choices[1] = torch.tensor(LEVELS).flatten()
    limits, length, slots = torch.tensor([9, limit, 9]), torch.tensor([7, 7, 7]), torch.tensor([1, 2])
    found, parents, depths, lens = chosen_nodes(choices, limits, length, length + left, slots, tree=TREE, count=3)
    # The second row's slot has no choices yet.
    assert found.tolist() == [drafts, [-1] * 5]
    assert lens.tolist() == [sum(draft >= 0 for draft in drafts), 0]
    assert parents.tolist() == [[-1, 0, 0, 2, 2, 4]] * 2 and depths.tolist() == [[0, 1, 1, 2, 2, 3]] * 2


def test_a_tree_with_more_branches_than_choices_is_refused() -> None:
    heads = MedusaHeads(2, 1, 64, 128).eval()
    with raises(InvalidTiers, reason=re.compile("branch index 10, and the drafter chooses 10 tokens of each level")):
        wrap(tiny_llama(), "medusa", draft=heads, tiers=(0, Tree.static([(10,)])), backend="eager", max_len=64)

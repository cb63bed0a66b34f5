"""The shapes of tree tiers."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from speccompile import Tree
from speccompile.errors import InvalidOption
from speccompile.graph.tree import chains, depth_of, in_order
from support.errors import raises

#: A tree as the parents and ranks that a static one has.
paths = st.lists(st.tuples(*[st.integers(0, 3)] * 4), min_size=1, max_size=5).map(
    lambda leaves: sorted({leaf[:depth] for leaf in leaves for depth in range(1, 5)})
)


@given(paths, st.randoms(use_true_random=False))
def test_a_static_tree_is_its_paths_in_any_order(given_paths: list[tuple[int, ...]], rng: Any) -> None:
    shuffled = list(given_paths)
    rng.shuffle(shuffled)
    tree = Tree.static(shuffled)
    assert tree == Tree.static(given_paths) and sorted(tree.paths) == given_paths
    assert int(tree) == len(given_paths)
    assert tree.depth == max(map(len, given_paths)) and tree.branches == max(max(path) for path in given_paths) + 1
    assert tree.parents is not None and all(parent < node for node, parent in enumerate(tree.parents, 1))
    # Prefixes come first, so the first nodes of a tree are a tree.
    assert [len(path) for path in tree.paths] == sorted(len(path) for path in tree.paths)


def test_as_a_number_it_is_its_draft_tokens() -> None:
    tree = Tree.dynamic(nodes=8, depth=4, branches=3)
    assert tree + 1 == 9 and max(7, tree) is tree and sorted([tree, 0, 9, 3]) == [0, 3, tree, 9]
    assert chains((0, 3, tree, 9)) == (0, 3, 9)
    assert in_order({tree, 8, 0, Tree.static([(0,)]), 9}) == (0, Tree.static([(0,)]), 8, tree, 9)
    assert (depth_of(tree), depth_of(7)) == (4, 7)


def test_shapes_differ_from_draft_lengths_and_from_one_another() -> None:
    tree, other = Tree.dynamic(nodes=8, depth=4, branches=3), Tree.dynamic(nodes=8, depth=5, branches=3)
    assert tree == Tree.dynamic(nodes=8, depth=4, branches=3) and hash(tree) == hash(copy.copy(tree))
    assert tree not in [8, other] and 8 not in [tree] and tree != 8
    assert {8: "chain", tree: "tree"}[tree] == "tree" and tree not in (8, other)
    assert len({str(shape) for shape in (tree, other, 8, Tree.static([(0,), (0, 0)]), Tree.static([(0,), (1,)]))}) == 5


@pytest.mark.parametrize("tree", [Tree.dynamic(8, 4, 3), Tree.static([(1,), (0,), (1, 2)])], ids=["dynamic", "static"])
def test_it_is_pickled_and_printed_as_code(tree: Tree) -> None:
    assert pickle.loads(pickle.dumps(tree)) == tree == copy.deepcopy(tree)
    assert eval(repr(tree), {"Tree": Tree}) == tree


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda: Tree.static(3), "paths", "give paths from the root"),  # type: ignore[arg-type]
        (lambda: Tree.static([]), "paths", "at least one path"),
        (lambda: Tree.static([()]), "paths", "branch indices from the root on"),
        (lambda: Tree.static([(0,), (-1,)]), "paths", r"\(-1,\) must be a path"),
        (lambda: Tree.static([(0,), (True,)]), "paths", "must be a path"),
        (lambda: Tree.static([0, 1]), "paths", "0 must be a path"),
        (lambda: Tree.static([(0,), (0,)]), "paths", "occurs twice"),
        (lambda: Tree.static([(0,), (1, 0)]), "paths", r"the path \(1,\) is missing"),
        (lambda: Tree.dynamic(0, 1, 1), "nodes", "at least 1"),
        (lambda: Tree.dynamic(4, 5, 2), "depth", "at most 4 deep"),
        (lambda: Tree.dynamic(4, 2, 1), "nodes", "has 2 nodes"),
        (lambda: Tree.dynamic(4, 2, 1.5), "branches", "an int"),
        (lambda: Tree.dynamic(10**9, 10**8, 1), "nodes", "has 100000000 nodes"),
        (lambda: Tree(8), "arguments", r"Tree\.static\(paths\)"),
    ],
)
def test_malformed_trees_are_refused(make: Callable[[], Tree], name: str, reason: str) -> None:
    with raises(InvalidOption, name=name, reason=re.compile(reason)):
        make()


def test_numbers_may_be_those_of_numpy() -> None:
    assert Tree.dynamic(np.int64(8), np.int32(4), np.int64(3)) == Tree.dynamic(8, 4, 3)  # type: ignore[arg-type]
    assert Tree.static(np.array([[0], [1]])) == Tree.static([(0,), (1,)])
    assert repr(Tree.static([(np.int64(0),)])) == "Tree.static([(0,)])"  # type: ignore[list-item]


def test_large_trees_take_no_longer_than_their_nodes() -> None:
    assert Tree.dynamic(nodes=10**9, depth=10**9, branches=2).depth == 10**9
    line = Tree.static([(0,) * depth for depth in range(1, 1200)]).draw().splitlines()
    assert line[-1].endswith(f"1199  {'.'.join('0' * 1199)}")


def test_a_drawing_has_every_node_under_its_parent() -> None:
    tree = Tree.static([(0,), (2,), (0, 0), (0, 1), (2, 0)])
    assert tree.draw().splitlines() == [
        "0  the newest token",
        "├─ 1  0",
        "│  ├─ 3  0.0",
        "│  └─ 4  0.1",
        "└─ 2  2",
        "   └─ 5  2.0",
    ]


def test_of_a_dynamic_tree_levels_are_drawn() -> None:
    assert Tree.dynamic(nodes=7, depth=3, branches=2).draw().splitlines() == [
        "7 nodes, the likeliest",
        "level 1: up to 2 nodes",
        "level 2: up to 4 nodes",
        "level 3: up to 5 nodes",
    ]


def test_a_tree_cannot_have_more_nodes_than_its_branches_allow() -> None:
    assert int(Tree.dynamic(nodes=6, depth=2, branches=2)) == 6
    with raises(InvalidOption, name="nodes"):
        Tree.dynamic(nodes=7, depth=2, branches=2)

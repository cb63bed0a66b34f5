"""The ops of draft trees: by hand, against plain definitions, and C++ against Python."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile import Tree
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.tree import fit_tree, move_path_, walk_tree
from speccompile.passes.step.tree_accept import at_the_root, next_node
from support.tree_cases import proposals, shapes

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
DEFINITIONS = {"fit_tree": fit_tree, "walk_tree": walk_tree, "move_path_": move_path_}
FORMS: dict[str, Callable[[str], Callable[..., Any]]] = {
    "definition": DEFINITIONS.__getitem__,
    "C++": lambda name: getattr(OPS, name),
}


def fit(
    tokens: list[list[int]], parents: list[list[int]], count: list[int], tree: Tree, form: str = "C++", limit: int = 99
) -> list[torch.Tensor]:
    given_tokens, given_parents = torch.tensor(tokens), torch.tensor(parents)
    static = (list(tree.parents or ()), list(tree.ranks or ()))
    sizes = (int(tree), tree.depth, tree.branches)
    return list(
        FORMS[form]("fit_tree")(
            given_tokens, given_parents, torch.tensor(count), torch.tensor([limit] * len(count)), *sizes, *static
        )
    )


def paths_of(drafts: torch.Tensor, parents: torch.Tensor) -> dict[tuple[int, ...], int]:
    """The tokens from the root to each node that has one, and which node that is."""
    found: dict[int, tuple[int, ...]] = {0: ()}
    for node, token in enumerate(drafts.tolist(), 1):
        if token >= 0:
            found[node] = (*found[int(parents[node])], token)
    return {path: node for node, path in found.items()}


@pytest.mark.parametrize("form", FORMS)
def test_by_hand(form: str) -> None:
    # 5 -> (6 -> 8), 7 beside it, and 9 after 7.
    tokens, parents = [[5, 6, 7, 8, 9]], [[0, 1, 0, 2, 3]]
    drafts, of, depths, lens = fit(tokens, parents, [5], Tree.dynamic(nodes=4, depth=2, branches=2), form)
    assert drafts.tolist() == [[5, 6, 7, 9]] and of.tolist() == [[-1, 0, 1, 0, 3]]
    assert depths.tolist() == [[0, 1, 2, 1, 2]] and lens.tolist() == [4]
    drafts, of, depths, lens = fit(tokens, parents, [5], Tree.static([(0,), (1,), (1, 0), (1, 1)]), form)
    assert drafts.tolist() == [[5, 7, 9, -1]] and of.tolist() == [[-1, 0, 0, 2, 2]] and lens.tolist() == [3]
    target = torch.tensor([[7, 0, 9, 4, 0]])
    path, accepted = FORMS[form]("walk_tree")(target, drafts, of, 2)
    assert path.tolist() == [[0, 2, 3]] and accepted.tolist() == [2]
    assert target.gather(1, path).tolist() == [[7, 9, 4]]


@settings(deadline=None, max_examples=150)
@given(proposals, shapes, st.integers(0, 12), st.integers(0, 10**6))
def test_what_fits_is_a_part_of_the_proposal(parents: tuple[int, ...], tree: Tree, limit: int, seed: int) -> None:
    if not parents:
        return
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(50, (len(parents),), generator=generator).tolist()
    drafts, of, depths, lens = (x[0] for x in fit([tokens], [list(parents)], [len(parents)], tree, limit=limit))
    proposed = [()]
    for token, parent in zip(tokens, parents, strict=True):
        proposed.append((*proposed[parent], token))
    taken = [node for node, token in enumerate(drafts.tolist(), 1) if token >= 0]
    assert int(lens) == len(taken) <= min(limit, int(tree))
    children: dict[int, int] = {}
    for node in range(1, tree + 1):
        parent = int(of[node])
        assert 0 <= parent < node and depths[node] == depths[parent] + 1 <= tree.depth
        assert parent == 0 or parent in taken or node not in taken
        if node in taken:
            children[parent] = children.get(parent, 0) + 1
    assert max(children.values(), default=0) <= tree.branches
    assert {path for path in paths_of(drafts, of)} <= set(proposed)
    # Of the tokens that are wanted, only what the shape has no room for is left out.
    if tree.parents is None and limit >= len(parents) and int(tree) >= len(parents) and tree.depth >= len(parents):
        ranks = [list(parents[:i]).count(parent) for i, parent in enumerate(parents)]
        assert len(taken) == len(parents) or max(ranks) >= tree.branches


@settings(deadline=None, max_examples=100)
@given(st.lists(proposals, min_size=1, max_size=3), shapes, st.integers(0, 13), st.integers(0, 10**6))
def test_the_ops_in_cpp_are_the_same(rows: list[tuple[int, ...]], tree: Tree, limit: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    longest = max(1, *map(len, rows))
    # Few tokens, so that siblings may be equal and targets are found.
    tokens = torch.randint(-1, 3, (len(rows), longest), generator=generator).tolist()
    parents = [[*row, *[0] * (longest - len(row))] for row in rows]
    ours, theirs = (fit(tokens, parents, [len(row) for row in rows], tree, form, limit) for form in FORMS)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
    target = torch.randint(-1, 3, (len(rows), tree + 1), generator=generator)
    walks = [FORMS[form]("walk_tree")(target, ours[0], ours[1], tree.depth) for form in FORMS]
    for one, other in zip(*walks, strict=True):
        assert torch.equal(one, other)
    path, accepted = walks[0]
    kv = [torch.randn(4, 40, 2, 3, generator=generator), torch.randn(4, 40, 5, generator=generator).bfloat16()]
    slots = torch.randperm(4, generator=generator)[: len(rows)]
    root = torch.randint(0, 20, (len(rows),), generator=generator)
    moved = [[tensor.clone() for tensor in kv] for _ in FORMS]
    for form, own in zip(FORMS, moved, strict=True):
        FORMS[form]("move_path_")(own, slots, root, path, accepted)
    for before, one, other in zip(kv, *moved, strict=True):
        assert torch.equal(one, other)
        for row, slot in enumerate(slots.tolist()):
            for depth in range(int(accepted[row]) + 1):
                place = int(root[row])
                assert torch.equal(one[slot, place + depth], before[slot, place + int(path[row, depth])])
        untouched = [slot for slot in range(4) if slot not in slots.tolist()]
        assert torch.equal(one[untouched], before[untouched])


@settings(deadline=None, max_examples=60)
@given(proposals, st.integers(0, 10**6))
def test_a_walk_is_the_longest_path_of_the_targets_tokens(parents: tuple[int, ...], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    nodes = len(parents)
    of = torch.tensor([[-1, *parents]])
    drafts = torch.randint(2, (1, nodes), generator=generator)
    target = torch.randint(2, (1, nodes + 1), generator=generator)
    path, accepted = OPS.walk_tree(target, drafts, of, nodes)
    found = path[0, : int(accepted) + 1].tolist()
    assert found[0] == 0 and all(parents[node - 1] == before for before, node in itertools.pairwise(found))
    assert all(drafts[0, node - 1] == target[0, before] for before, node in itertools.pairwise(found))
    children = [node for node, parent in enumerate(parents, 1) if parent == found[-1]]
    assert not any(drafts[0, node - 1] == target[0, found[-1]] for node in children)


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampled"])
def test_all_drafts_and_targets_of_a_tree_of_three_levels(greedy: bool) -> None:
    """``exact`` over three tokens: what is emitted is what the target writes alone, up to where no draft is right."""
    tree, vocab = Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)]), 3
    of = torch.tensor([-1, *(tree.parents or ())])
    drafts = torch.cartesian_prod(*[torch.arange(-1, vocab)] * int(tree))
    # Siblings differ; what follows no draft is none.
    one = (drafts[:, 0] != drafts[:, 1]) & (drafts[:, 2] != drafts[:, 3])
    there = drafts >= 0
    drafts = drafts[one & (there[:, 0] | ~there[:, 2:4].any(1)) & (there[:, 2] | ~there[:, 4])]
    target = torch.cartesian_prod(*[torch.arange(vocab)] * (tree + 1))
    count = len(drafts)
    drafts, target = drafts.repeat_interleave(len(target), 0), target.repeat(count, 1)
    of = of.expand(len(drafts), -1)
    if greedy:
        path, accepted = OPS.walk_tree(target, drafts, of, tree.depth)
    else:
        now, walks, accepted = at_the_root(drafts[:, 0])
        nodes = [now]
        for _ in range(tree.depth):
            step = next_node(drafts, of, now, target.gather(1, now[:, None]), walks, accepted)
            now, walks, accepted = step
            nodes.append(now)
        path = torch.stack(nodes, 1)
    emitted = target.gather(1, path)
    # The target alone: its token after each text. Where the tree has no node of that text, nothing more is emitted.
    node, right = torch.zeros_like(accepted), torch.zeros_like(accepted)
    alive = torch.ones_like(accepted, dtype=torch.bool)
    for depth in range(tree.depth + 1):
        token = target.gather(1, node[:, None])[:, 0]
        assert torch.equal(emitted[alive, depth], token[alive])
        child = torch.full_like(node, -1)
        for other in range(1, tree + 1):
            child = torch.where((of[:, other] == node) & (drafts[:, other - 1] == token), other, child)
        alive = alive & (child > 0)
        node, right = torch.where(alive, child, node), right + alive
    assert torch.equal(accepted, right) and set(accepted.tolist()) == {0, 1, 2, 3}


@pytest.mark.parametrize("form", FORMS)
def test_a_parent_that_comes_later_is_refused(form: str) -> None:
    with pytest.raises(RuntimeError, match=r"draft token 1 .* has the parent 2, and must have"):
        fit([[5, 6]], [[2, 0]], [2], Tree.dynamic(2, 2, 2), form)
    with pytest.raises(RuntimeError, match=r"draft token 2 .* has the parent -1, and must have"):
        fit([[5, 6]], [[0, -1]], [2], Tree.dynamic(2, 2, 2), form)


@pytest.mark.parametrize("form", FORMS)
def test_counts_that_are_no_counts_are_bounded(form: str) -> None:
    drafts, _, _, lens = fit([[5, 6], [7, 8]], [[0, 1], [0, 1]], [-3, 9], Tree.dynamic(2, 2, 2), form)
    assert drafts.tolist() == [[-1, -1], [7, 8]] and lens.tolist() == [0, 2]


def test_a_static_tree_needs_all_its_ranks() -> None:
    one = torch.ones(1, dtype=torch.int64)
    with pytest.raises(RuntimeError, match="a parent and a rank for each node"):
        OPS.fit_tree(one[None], one[None] - 1, one, one, 2, 2, 1, [0, 1], [0])


def test_opcheck() -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")

    def check(name: str, *arguments: Any) -> None:
        torch.library.opcheck(getattr(OPS, name).default, arguments, test_utils=checks)

    rows = torch.tensor([2])
    check("fit_tree", torch.tensor([[3, 4]]), torch.tensor([[0, 1]]), rows, rows, 2, 2, 1, [], [])
    of = torch.tensor([[-1, 0, 1]])
    check("walk_tree", torch.tensor([[3, 4, 5]]), torch.tensor([[3, 4]]), of, 2)
    path = torch.tensor([[0, 1, 2]])
    check("move_path_", [torch.randn(3, 9, 2, 4)], rows, torch.tensor([3]), path, rows)

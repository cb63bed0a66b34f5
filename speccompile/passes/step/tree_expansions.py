"""The nodes of a tree that a drafter reads, and the tokens that it proposes for them: known before any step."""

from __future__ import annotations

from dataclasses import dataclass

from speccompile.graph.tree import Tree


@dataclass(frozen=True)
class Expansion:
    """Nodes of one level that are read, and the number of tokens into which each of them branches.

    Args:
        count: nodes that are read.
        fixed: which tokens of the level, of a static tree; of a dynamic one, empty: the likeliest.
        branches: children of each.
    """

    count: int
    fixed: tuple[int, ...]
    branches: int


def expansions(tree: Tree) -> list[Expansion]:
    """Expansions by level, that of the root first. A dynamic tree's have together at most as many nodes as the tree."""
    if tree.parents is None:
        found, left = [Expansion(1, (), tree.branches)], int(tree)
        for level in range(1, tree.depth):
            count = min(-(-left // (tree.depth - level)), found[-1].count * tree.branches)
            left -= count
            found.append(Expansion(count, (), tree.branches))
        return found
    found = []
    read: list[tuple[int, ...]] = [()]
    places: tuple[int, ...] = (0,)
    inner = {path[:-1] for path in tree.paths}
    for level in range(tree.depth):
        below = [path for path in tree.paths if len(path) == level + 1]
        branches = 1 + max(path[-1] for path in below)
        found.append(Expansion(len(read), places, branches))
        below = [path for path in below if path in inner]
        places = tuple(read.index(path[:-1]) * branches + path[-1] for path in below)
        read = below
    return found


def places_of_nodes(tree: Tree) -> tuple[int, ...]:
    """The index of each node of a static tree among all tokens that are proposed for the tree."""
    found: dict[tuple[int, ...], int] = {}
    first = 0
    read: list[tuple[int, ...]] = [()]
    inner = {path[:-1] for path in tree.paths}
    for level, expansion in enumerate(expansions(tree), 1):
        below = [path for path in tree.paths if len(path) == level]
        found |= {path: first + read.index(path[:-1]) * expansion.branches + path[-1] for path in below}
        first += expansion.count * expansion.branches
        read = [path for path in below if path in inner]
    return tuple(found[path] for path in tree.paths)

"""The nodes of a tree that a drafter reads, and the tokens that it proposes for them: known before any step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speccompile.graph.tree import Tree

#: Values up to which :func:`numbers` has an op for each.
SINGLE_VALUES = 12


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


def numbers(values: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 ``[n]``, as ops: a step holds no constants.

    One op for each value is a kernel launch for each node of a tree. More than ``SINGLE_VALUES`` share a few int64,
    from which one shift unpacks them.
    """
    if len(values) <= SINGLE_VALUES:
        return torch.cat([torch.full((1,), value, device=device) for value in values])
    low = min(values)
    bits = max(1, (max(values) - low).bit_length())
    per_word = 63 // bits
    words = [
        sum(value - low << index * bits for index, value in enumerate(values[first : first + per_word]))
        for first in range(0, len(values), per_word)
    ]
    packed = torch.cat([torch.full((1, 1), word, device=device) for word in words])
    shifts = torch.arange(0, per_word * bits, bits, device=device)
    found = (packed >> shifts & (1 << bits) - 1).flatten()[: len(values)]
    return found + low if low else found

"""One tree of the proposals of several drafters, in C++ on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.tree import merged

_SCHEMA = (
    "merge_trees(Tensor[] tokens, Tensor[] parents, Tensor[] counts, Tensor[] scores, int nodes) -> "
    "(Tensor, Tensor, Tensor)"
)


def merge_trees(
    tokens: Sequence[torch.Tensor],
    parents: Sequence[torch.Tensor],
    counts: Sequence[torch.Tensor],
    scores: Sequence[torch.Tensor],
    nodes: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Merge the trees of several drafters into one of the likeliest tokens. A token on the same path in several trees
    counts once, with its greatest probability. Of equal ones, that of the first drafter comes first.

    Args:
        tokens, parents: int64 ``[B, P]`` of each drafter, as :func:`speccompile.ops.tree.fit_tree` has them.
        counts: int64 ``[B]`` of each, the valid tokens.
        scores: float32 ``[B, P]`` of each, the probability that a token and all before it are right.
        nodes: the largest number of tokens of the result.

    Returns:
        Tokens and parents, int64 ``[B, nodes]``, 0 after the last; their number, int64 ``[B]``.
    """
    rows = counts[0].shape[0]
    found, above, count = (counts[0].new_zeros(shape) for shape in ((rows, nodes), (rows, nodes), (rows,)))
    for row in range(rows):
        of_row = [
            (own[0][row].tolist(), own[1][row].tolist(), own[3][row].tolist(), int(own[2][row]))
            for own in zip(tokens, parents, counts, scores, strict=True)
        ]
        paths = (path for own in of_row for path in _paths(*own))
        best, best_parents, _ = merged(paths, nodes)
        count[row] = len(best)
        found[row, : len(best)] = torch.tensor(best, dtype=torch.int64)
        above[row, : len(best)] = torch.tensor(best_parents, dtype=torch.int64)
    return found, above, count


def _paths(
    tokens: list[int], parents: list[int], scores: list[float], count: int
) -> Iterator[tuple[list[int], list[float]]]:
    """The tokens and probabilities from the root to each node."""
    known: list[tuple[list[int], list[float]]] = [([], [])]
    for token, parent, score in zip(tokens[:count], parents, scores, strict=False):
        path, chances = known[parent]
        known.append(([*path, token], [*chances, score]))
        yield known[-1]


def _fake(tokens, parents, counts, scores, nodes):  # type: ignore[no-untyped-def]
    wide = counts[0].new_empty((counts[0].shape[0], nodes))
    return wide, torch.empty_like(wide), torch.empty_like(counts[0])


define(_SCHEMA, _fake, merge_trees, cpp=BASE, recorded=True)

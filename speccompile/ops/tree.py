"""Draft trees in a step: fitting a proposal into a tier, finding the accepted path, and moving its KV.

Nodes are numbered from 0, the newest committed token; node i > 0 is the draft token i - 1. On a CPU
the ops are C++ (``ops/cpu/csrc/base/kernels/tree.cpp``), and on CUDA Triton kernels (``ops/triton/tree.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

#: Tokens, the parent of each (0 for the root, else the token's index plus one), and cumulative probabilities.
TreeProposal = tuple[list[int], list[int], list[float]]


def merged(paths: Iterable[tuple[Sequence[int], Sequence[float]]], nodes: int) -> TreeProposal:
    """The tree of ``paths``, each of tokens and cumulative probabilities: its ``nodes`` likeliest tokens, the likeliest
    first. A token on several paths has the greatest of its probabilities."""
    tokens: list[int] = []
    parents: list[int] = []
    chances: list[float] = []
    for path in paths:
        node = 0
        for token, chance in zip(*path, strict=True):
            children = (i for i, parent in enumerate(parents) if parent == node and tokens[i] == token)
            if (known := next(children, None)) is None:
                known = len(tokens)
                tokens.append(token)
                parents.append(node)
                chances.append(0.0)
            # Scores are rounded, and no child is likelier than its parent.
            chances[known] = max(chances[known], min(chance, chances[node - 1]) if node else chance)
            node = known + 1
    # Stable, and no child is likelier than its parent: so no token is before its parent.
    order = sorted(range(len(tokens)), key=lambda i: -chances[i])[:nodes]
    number = {0: 0} | {old + 1: new for new, old in enumerate(order, 1)}
    return [tokens[i] for i in order], [number[parents[i]] for i in order], [chances[i] for i in order]


def fit_tree(
    tokens: torch.Tensor,
    parents: torch.Tensor,
    count: torch.Tensor,
    limit: torch.Tensor,
    nodes: int,
    depth: int,
    branches: int,
    static_parents: list[int],
    static_ranks: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Fit the rows' proposals into a tier's shape.

    Args:
        tokens: int64 ``[B, P]``, the likeliest first; any number of the first ones are a tree.
        parents: int64 ``[B, P]``, the parent of the node of each token, 0 for the root.
        count, limit: int64 ``[B]``, the number of proposed tokens, and the request's limit on drafts.
        nodes, depth, branches: of the :class:`~speccompile.graph.tree.Tree`.
        static_parents, static_ranks: of a static one, else empty.

    Returns:
        ``drafts`` int64 ``[B, nodes]``, -1 where the shape has a node and the proposal none; ``parents`` int64
        ``[B, 1 + nodes]``, -1 for the root; ``depths`` int64 ``[B, 1 + nodes]``; and int64 ``[B]``, the number of
        drafts.
    """
    rows = tokens.shape[0]
    drafts = tokens.new_full((rows, nodes), -1)
    taken_parents, depths = tokens.new_zeros((rows, nodes + 1)), tokens.new_ones((rows, nodes + 1))
    taken_parents[:, 0], depths[:, 0] = -1, 0
    if static_parents:
        for node, parent in enumerate(static_parents, 1):
            taken_parents[:, node] = parent
            depths[:, node] = depths[:, parent] + 1
    lens = torch.zeros_like(count)
    for row in range(rows):
        most = max(0, min(int(count[row]), int(limit[row]), tokens.shape[1]))
        _check_parents(parents[row, :most].tolist())
        lens[row] = _fit_row(
            tokens[row].tolist(),
            parents[row].tolist(),
            most,
            (nodes, depth, branches),
            {pair: node for node, pair in enumerate(zip(static_parents, static_ranks, strict=True), 1)},
            (drafts[row], taken_parents[row], depths[row]),
        )
    return drafts, taken_parents, depths, lens


def _check_parents(parents: list[int]) -> None:
    """Raise RuntimeError for a parent that is not a node before its child."""
    for index, parent in enumerate(parents):
        if not 0 <= parent <= index:
            raise RuntimeError(
                f"speccompile::fit_tree: draft token {index + 1} of a proposed tree has the parent {parent}, and must "
                "have that of a token before it: 0 for the newest token of the text, 1 for the first draft token"
            )


def _fit_row(
    tokens: list[int],
    parents: list[int],
    count: int,
    sizes: tuple[int, int, int],
    static: dict[tuple[int, int], int],
    out: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
) -> int:
    nodes, depth, branches = sizes
    drafts, taken_parents, depths = out
    children = [0] * (len(tokens) + 1)
    # The node in the shape of each proposed node; 0 is the root, and None did not fit.
    taken: list[int | None] = [0] + [None] * len(tokens)
    found = 0
    for index in range(count):
        parent = taken[parents[index]]
        rank = children[parents[index]]
        children[parents[index]] += 1
        if parent is None or tokens[index] < 0:
            continue
        if static:
            node = static.get((parent, rank))
        else:
            fits = found < nodes and rank < branches and int(depths[parent]) < depth
            node = found + 1 if fits else None
        if node is None:
            continue
        taken[index + 1] = node
        drafts[node - 1] = tokens[index]
        taken_parents[node] = parent
        depths[node] = depths[parent] + 1
        found += 1
    return found


def walk_tree(
    target: torch.Tensor, drafts: torch.Tensor, parents: torch.Tensor, depth: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the root to the child that is the target's token, as long as there is one.

    Args:
        target: int64 ``[B, T]``, the target's token after each node; drafts: int64 ``[B, T - 1]``, -1 for none;
        parents: int64 ``[B, T]``.
        depth: of the tree.

    Returns:
        The nodes on the path, int64 ``[B, 1 + depth]``, the last one again after its end, and how many draft tokens
        are on it, int64 ``[B]``.
    """
    now = torch.zeros_like(target[:, 0])
    path, accepted, walks = [now], torch.zeros_like(now), torch.ones_like(now, dtype=torch.bool)
    for _ in range(depth):
        now, walks = child_of(drafts, parents, now, target.gather(1, now[:, None])[:, 0], walks)
        accepted = accepted + walks
        path.append(now)
    return torch.stack(path, 1), accepted


def child_of(
    drafts: torch.Tensor, parents: torch.Tensor, now: torch.Tensor, token: torch.Tensor, walks: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first child of the nodes ``now`` ``[B]`` that is ``token`` ``[B]``, and whether there is one; without one, or
    where ``walks`` (bool ``[B]``) is False, ``now``.
    """
    fits = (parents[:, 1:] == now[:, None]) & (drafts == token[:, None]) & (token >= 0)[:, None] & walks[:, None]
    found = fits.any(1)
    return torch.where(found, fits.long().argmax(1) + 1, now), found


def move_path_(
    kv: list[torch.Tensor],
    slots: torch.Tensor,
    root: torch.Tensor,
    path: torch.Tensor,
    accepted: torch.Tensor,
    pages: torch.Tensor | None = None,
) -> None:
    """Move the values of an accepted path to the positions where a chain would have written them.

    Args:
        kv: tensors with a value for each position, ``[N, S, ...]``; that of node i lies at the root's position plus i.
        slots: int64 ``[B]``, distinct; root: int64 ``[B]``, the root's position.
        path, accepted: of :func:`walk_tree`.
        pages: int64 ``[N, M]``, where ``kv`` are pools of pages; see :func:`speccompile.ops.attention.reference`.
    """
    offsets = torch.arange(path.shape[1], device=path.device)
    places = root[:, None] + torch.where(offsets <= accepted[:, None], path, offsets)
    to = root[:, None] + offsets
    for tensor in kv:
        size = tensor.shape[1]
        moved, written = (
            (slots[:, None], at) if pages is None else (pages[slots[:, None], at // size], at % size)
            for at in (places, to)
        )
        tensor.index_put_(written, tensor[moved])


def _fit_fake(tokens, parents, count, limit, nodes, *rest):  # type: ignore[no-untyped-def]
    rows = tokens.shape[0]
    wide = tokens.new_empty((rows, nodes + 1))
    return tokens.new_empty((rows, nodes)), wide, wide.clone(), torch.empty_like(count)


def _walk_fake(target, drafts, parents, depth):  # type: ignore[no-untyped-def]
    return target.new_empty((target.shape[0], depth + 1)), target.new_empty((target.shape[0],))


define(
    "fit_tree(Tensor tokens, Tensor parents, Tensor count, Tensor limit, int nodes, int depth, int branches, "
    "int[] static_parents, int[] static_ranks) -> (Tensor, Tensor, Tensor, Tensor)",
    _fit_fake,
    fit_tree,
    cpp=BASE,
    recorded=True,
    cuda="tree.fit_tree",
)
define(
    "walk_tree(Tensor target, Tensor drafts, Tensor parents, int depth) -> (Tensor, Tensor)",
    _walk_fake,
    walk_tree,
    cpp=BASE,
    recorded=True,
    cuda="tree.walk_tree",
)
define(
    "move_path_(Tensor(a!)[] kv, Tensor slots, Tensor root, Tensor path, Tensor accepted, Tensor? pages=None) -> ()",
    None,
    move_path_,
    cpp=BASE,
    recorded=True,
    cuda="tree.move_path",
)

"""Tables of the likeliest successors of tokens and of pairs of tokens: written from logits, followed by drafts.

The ops of the mode ``recycle``, in C++ on a CPU (``ops/cpu/csrc/base/kernels/successors.cpp``). The functions of this
file are their definitions.

The tables of a vocabulary of V tokens and H places for pairs have ``V + H + 1`` rows of k successors: a row for each
token, then a row for each place, then one that collects writes without effect. ``successors`` is int32 ``[V + H + 1,
k]``: 1 + token, the likeliest first, and 0 for none. ``logprobs`` is float32 of that shape. ``keys`` is int64 ``[H +
1]``: 1 + the pair whose successors are at that place, and 0 for none. A pair is ``V * first + second``.
"""

from __future__ import annotations

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define

#: Multipliers of the hash of a pair; the sum of the products is less than 2**63 for tokens below 2**30.
FIRST, SECOND = 0x9E3779B1, 0x85EBCA77

_TABLES = "(Tensor{} successors, Tensor{} logprobs, Tensor{} keys, "
_STORE = (
    _TABLES.format("(a!)", "(b!)", "(c!)")
    + "Tensor tokens, Tensor alive, Tensor slots, Tensor positions, Tensor read, Tensor drafts, Tensor? parents, "
    "Tensor best, Tensor best_logprobs) -> ()"
)
_FOLLOW = (
    _TABLES.format("", "", "")
    + "Tensor tokens, Tensor length, Tensor places, int count, int branches, float least) -> "
    "(Tensor, Tensor, Tensor, Tensor)"
)

Proposal = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def place_of(first: torch.Tensor, second: torch.Tensor, places: int) -> torch.Tensor:
    """The place of each pair among ``places``, by a hash."""
    mixed = first * FIRST + second * SECOND
    return (mixed ^ (mixed >> 16)) % places


def store(
    successors: torch.Tensor,
    logprobs: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor,
    alive: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    read: torch.Tensor,
    drafts: torch.Tensor,
    parents: torch.Tensor | None,
    best: torch.Tensor,
    best_logprobs: torch.Tensor,
) -> None:
    """Write the likeliest tokens of each position of a step as the successors of the token there, and of the pair of
    that token and the one before it. Rows that are not alive, positions without a draft or without a likeliest
    token, and ids outside of the vocabulary write nothing.

    A position counts as right if its draft and all before it are the likeliest tokens after their parents. The others
    are read after tokens that will not be in the sequence, so they only write where nothing is. Of several right
    positions with one token or one place the last stays, of others the first; on a GPU it is not defined which.

    Args:
        tokens: int64 ``[N, S]``, the sequences; alive: bool ``[N]``; slots: int64 ``[B]``.
        positions: int64 ``[X, Y]``, X >= B, Y > K. The first is that of the row's newest token.
        read: int64 ``[X, Y]``, the tokens at the positions.
        drafts: int64 ``[B, K]``, -1 for none.
        parents: int64 ``[B, 1 + K]`` for a tree: the index in ``read`` of each token's parent, -1 for the first. None
            for a chain.
        best: int64 ``[B, 1 + K, k]``, -1 for none; best_logprobs: float32 of that shape.
    """
    rows, width = best.shape[:2]
    vocab, places = successors.shape[0] - keys.shape[0], keys.shape[0] - 1
    own, newest = read[:rows, :width], positions[:rows, 0]
    if parents is None:
        parents = torch.arange(-1, width - 1, device=own.device).expand(rows, -1)
    drafted = torch.cat([torch.ones_like(own[:, :1], dtype=torch.bool), drafts >= 0], 1)
    right = [drafted[:, 0]]
    for node in range(1, width):
        parent = parents[:, node : node + 1]
        likeliest = best[..., 0].gather(1, parent)[:, 0] == own[:, node]
        right.append(torch.stack(right, 1).gather(1, parent)[:, 0] & likeliest)
    before = torch.where(newest > 0, tokens[slots, (newest - 1).clamp(min=0)], -1)
    first = torch.cat([before[:, None], own.gather(1, parents[:, 1:])], 1)
    pairs = torch.where(first >= 0, first * vocab + own + 1, 0)
    place = torch.where((first >= 0) & (places > 0), place_of(first.clamp(min=0), own, max(places, 1)), places)

    valid, is_right = drafted & alive[slots, None] & (own < vocab) & (best[..., 0] >= 0), torch.stack(right, 1)
    own, place = own.clamp(max=vocab - 1), torch.where(first < vocab, place, places)
    values, nothing = (best + 1).to(torch.int32), vocab + places
    for row, absent in ((own, successors[own, 0] == 0), (vocab + place, keys[place] == 0)):
        # Indices without an effect are those of the last row. Of equal indices the last one is written.
        others = torch.where(valid & ~is_right & absent, row, nothing).flatten().flip(0)
        rest = torch.where(valid & is_right, row, nothing).flatten()
        for at, turn in ((others, True), (rest, False)):
            for table, value in ((successors, values.flatten(0, 1)), (logprobs, best_logprobs.flatten(0, 1))):
                table.index_put_((at,), value.flip(0) if turn else value)
            if row is not own:
                keys.index_put_((at - vocab,), pairs.flatten().flip(0) if turn else pairs.flatten())


def follow(
    successors: torch.Tensor,
    logprobs: torch.Tensor,
    keys: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    places: torch.Tensor,
    count: int,
    branches: int,
    least: float,
) -> Proposal:
    """Draft the tokens of largest probability after the newest one, by the product of stored probabilities.

    The successors of a token on a path are those of the pair of it and the token before it, if that pair is in the
    table, else its own. An id outside of the vocabulary has none.

    Args:
        tokens: int64 ``[X, S]``; length: int64 ``[X]``, the committed tokens.
        places: int64 ``[B]``, each row's sequence.
        count: most drafts.
        branches: most successors of one token that are drafted, at most k; 1 drafts a chain.
        least: the least log-probability of a draft and all before it.

    Returns:
        Draft tokens, int64 ``[B, count]``, likeliest first and no token before its parent, 0 after the last. Their
            parents, int64 ``[B, count]``: 0 for the newest token, else i + 1 for draft i. The number of drafts, int64
            ``[B]``. The log-probability of each with all before it, float32 ``[B, count]``, -inf after the last.
    """
    rows, device = places.shape[0], places.device
    vocab, pairs = successors.shape[0] - keys.shape[0], keys.shape[0] - 1
    newest_at = length[places] - 1
    token = tokens[places, newest_at.clamp(min=0)]
    first = torch.where(newest_at > 0, tokens[places, (newest_at - 1).clamp(min=0)], -1)
    worst = torch.full((rows,), float("-inf"), device=device)
    total = torch.where(newest_at >= 0, 0.0, worst)
    path = token[:, None]
    known: list[torch.Tensor] = []
    chances: list[torch.Tensor] = []
    drafts, parents, scores = [], [], []
    for _ in range(count):
        at = place_of(first.clamp(min=0), token, max(pairs, 1))
        in_table = (first >= 0) & (pairs > 0) & (keys[at.clamp(max=pairs)] == first * vocab + token + 1)
        known_token = token < vocab
        row = torch.where(in_table & known_token, vocab + at, token.clamp(max=vocab - 1))
        after = torch.where(known_token[:, None], successors[row, :branches].long() - 1, -1)
        known.append(after)
        chances.append(torch.where(after >= 0, total[:, None] + logprobs[row, :branches], worst[:, None]))
        candidates = torch.cat(chances, 1)
        best = candidates.argmax(1, keepdim=True)
        total = candidates.gather(1, best)[:, 0]
        valid = (total >= least) & (total > float("-inf"))
        total = torch.where(valid, total, worst)
        parent = torch.where(valid, best[:, 0] // branches, 0)
        token = torch.where(valid, torch.cat(known, 1).gather(1, best)[:, 0], 0)
        first = path.gather(1, parent[:, None])[:, 0]
        path = torch.cat([path, token[:, None]], 1)
        chances = [candidates.scatter(1, best, float("-inf"))]
        drafts.append(token)
        parents.append(parent)
        scores.append(total)
    logs = torch.stack(scores, 1)
    return torch.stack(drafts, 1), torch.stack(parents, 1), (logs > float("-inf")).sum(1), logs


def chances_of(logs: torch.Tensor) -> torch.Tensor:
    """The exponentials of ``logs``, float32, computed in float64."""
    return logs.double().exp().float()


def _fake_follow(successors, logprobs, keys, tokens, length, places, count, branches, least):  # type: ignore[no-untyped-def]
    drafts = tokens.new_empty((places.shape[0], count))
    return drafts, torch.empty_like(drafts), torch.empty_like(places), logprobs.new_empty(drafts.shape)


define("store_successors_" + _STORE, None, store, cpp=BASE, recorded=True)
define("follow_successors" + _FOLLOW, _fake_follow, follow, cpp=BASE, recorded=True)
define("chances_of(Tensor logs) -> Tensor", torch.empty_like, chances_of, cpp=BASE, recorded=True)

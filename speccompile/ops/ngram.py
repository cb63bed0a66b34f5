"""The n-gram match as ONE op, in C++ on a CPU (``ops/cpu/csrc/base/kernels/ngram.cpp``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.tree import merged

_SCHEMA = (
    "(Tensor tokens, Tensor length, Tensor slots, int max_ngram, int min_ngram, int draft_len) -> (Tensor, Tensor)"
)

#: The op that proposes trees.
TREE = "ngram_tree"
_TREE_SCHEMA = "(Tensor tokens, Tensor length, int max_ngram, int min_ngram, int nodes) -> (Tensor, Tensor, Tensor)"
#: Number of matches in a tree, and the assumed probability of a draft token if the one before it is accepted.
MATCHES, CONTINUES = 4, 0.8


def continue_match(
    tokens: torch.Tensor, length: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Propose the tokens that followed the most recent match of each row's longest suffix n-gram. At the end of the
    row's sequence they start again after the match.

    Args:
        tokens: int64 ``[B, S]``; length: int64 ``[B]``.

    Returns:
        Draft tokens int64 ``[B, K]`` and how many of them are valid ``[B]``: all of them, or none.
    """
    capacity = tokens.shape[1]
    places = torch.arange(capacity, device=tokens.device)
    newest = length[:, None] - 1

    # matched[b, i]: how many tokens that end at place i equal the text's newest ones, up to max_ngram.
    matched = torch.zeros_like(tokens)
    equal = places < newest
    for back in range(max_ngram):
        suffix_token = tokens.gather(1, (newest - back).clamp(min=0))
        shifted = torch.roll(tokens, back, dims=1)
        equal = equal & (places >= back) & (newest >= back) & (shifted == suffix_token)
        matched = matched + equal

    # Longest first, then most recent; a key of 0 is not a match.
    key = torch.where(matched >= min_ngram, matched * capacity + places, 0).amax(1)
    found = key > 0
    distance = torch.where(found, newest[:, 0] - key % capacity, 1)

    offsets = torch.arange(draft_len, device=tokens.device)
    source = newest + 1 - distance[:, None] + offsets % distance[:, None]
    drafts = tokens.gather(1, source.clamp(min=0, max=capacity - 1))
    return drafts, torch.where(found, draft_len, 0)


def reference(
    tokens: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, max_ngram: int, min_ngram: int, draft_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft tokens int64 ``[B, K]`` and how many of them count ``[B]``: all of them, or none.

    Args:
        tokens: int64 ``[N, S]``; length: int64 ``[N]``; slots: int64 ``[B]``.
    """
    return continue_match(tokens[slots], length[slots], max_ngram, min_ngram, draft_len)


def tree(
    tokens: torch.Tensor, length: torch.Tensor, max_ngram: int, min_ngram: int, nodes: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Propose the tokens that followed the :data:`MATCHES` best matches of each row's newest tokens, as one tree: the
    longest match first, of equal ones the most recent. Each match is assumed to be half as likely as the one before it,
    and each token :data:`CONTINUES` times as likely as the one before it.

    Args:
        tokens: int64 ``[B, S]``; length: int64 ``[B]``.

    Returns:
        Draft tokens and parents, int64 ``[B, P]``, and how many there are, int64 ``[B]``, as
        :meth:`speccompile.modes.ready_mode.ReadyMode.propose_tree` has them.
    """
    rows = tokens.shape[0]
    found, parents = tokens.new_zeros((rows, nodes)), tokens.new_zeros((rows, nodes))
    count = torch.zeros_like(length)
    for row in range(rows):
        text = tokens[row, : int(length[row])].tolist()
        paths = [
            ([text[place] for place in places], [share * CONTINUES**depth for depth in range(1, nodes + 1)])
            for places, share in _continuations(text, max_ngram, min_ngram, nodes)
        ]
        drafts, of, _ = merged(paths, nodes)
        count[row] = len(drafts)
        found[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        parents[row, : len(of)] = torch.tensor(of, dtype=torch.int64)
    return found, parents, count


def _continuations(text: list[int], max_ngram: int, min_ngram: int, nodes: int) -> Iterator[tuple[list[int], float]]:
    """The places of the tokens that follow each match, around again at the end, and how likely it is."""
    newest = len(text) - 1
    matches = []
    for place in range(newest - 1, -1, -1):
        matched = 0
        while matched < min(max_ngram, place + 1) and text[place - matched] == text[newest - matched]:
            matched += 1
        if matched >= min_ngram:
            matches.append((matched, place))
    # Stable: of equally long ones the most recent first.
    best = sorted(matches, key=lambda match: -match[0])[:MATCHES]
    for rank, (_, place) in enumerate(best):
        distance = newest - place
        yield [newest + 1 - distance + i % distance for i in range(nodes)], 0.5**rank


def _tree_fake(tokens, length, max_ngram, min_ngram, nodes):  # type: ignore[no-untyped-def]
    wide = tokens.new_empty((tokens.shape[0], nodes))
    return wide, wide.clone(), torch.empty_like(length)


def _fake(tokens, length, slots, max_ngram, min_ngram, draft_len):  # type: ignore[no-untyped-def]
    return tokens.new_empty((slots.shape[0], draft_len)), tokens.new_empty(slots.shape[0])


define("match_ngram" + _SCHEMA, _fake, reference, cpp=BASE, recorded=True, cuda="ngram.match")
define(TREE + _TREE_SCHEMA, _tree_fake, tree, cpp=BASE, recorded=True)

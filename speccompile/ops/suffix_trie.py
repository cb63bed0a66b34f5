"""Trie of all substrings of sequences up to a depth, with the number of occurrences of each, for suffix decoding.

Source: Oliaro et al., "SuffixDecoding" (2024), and Snowflake's ArcticInference. A token costs ``depth`` operations,
however long the sequence is. S tokens have at most ``S * depth`` nodes, so the state is bounded and lies in the arena.
It is the same whether tokens are added at once or one by one.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speccompile.ops.tree import TreeProposal

#: Fields of a node: its parent, token and count, the first of its listed children, and its parent's next listed child.
PARENT, TOKEN, COUNT, BEST, NEXT = range(5)
#: Number of fields.
FIELDS = 5
#: Number of listed children of a node: the most frequent ones. Among equals the newest is first.
LISTED = 8
#: Separates two texts.
SEPARATOR = -1

#: Nodes of a sequence's suffixes in a trie, by length, ``[depth + 1]``; 0 for the empty suffix and for a missing node.
Active = memoryview


@dataclass(frozen=True)
class Speculation:
    """Limits on the drafts that follow a match.

    Args:
        depth: depth of the trie. A match and the drafts after it are at most as long, together.
        factor, offset: after a match of m tokens there are at most ``factor * m + offset`` drafts.
        least: drafts end before one whose cumulative probability is below this.
    """

    depth: int
    factor: float
    offset: float
    least: float

    def most(self, matched: int, longest: int) -> int:
        """Largest number of drafts after a match of ``matched`` tokens."""
        return min(longest, int(matched * self.factor + self.offset + 1e-6), self.depth - matched)


Proposal = tuple[list[int], list[float]]


def expected(chances: Sequence[float]) -> float:
    """Expected number of accepted drafts, added up in order (``sum`` of Python 3.12 rounds in another way)."""
    total = 0.0
    for chance in chances:
        total += chance
    return total


class Trie:
    """One trie, over tables of the arena. Node 0 is the root, whose count stays 0.

    Args:
        used: ``[2]``, the numbers of learned tokens and of nodes.
        nodes: ``[5, nodes]``: the fields :data:`PARENT` to :data:`NEXT` of each node.
        index: hash table from parent and token to the node; an empty entry is 0.
    """

    def __init__(self, used: torch.Tensor, nodes: torch.Tensor, index: torch.Tensor) -> None:
        self._tables = used, nodes, index
        # Access to single elements is several times as fast through a memoryview as through an array.
        self._used, self._index = used.numpy().data, index.numpy().data
        self._parent, self._token, self._count, self._best, self._next = (row.numpy().data for row in nodes)

    @property
    def tokens(self) -> int:
        """Number of tokens in the trie."""
        return int(self._used[0])

    @property
    def size(self) -> int:
        """Number of nodes without the root."""
        return int(self._used[1])

    def clear(self) -> None:
        """Remove all tokens. The tables keep their addresses."""
        for table in self._tables:
            table.zero_()

    def learn(self, active: Active, token: int) -> None:
        """Add the next token of the sequence whose suffixes are ``active``."""
        # Longest first: the child of a suffix belongs to the suffix before this token.
        for depth in range(len(active) - 1, 0, -1):
            parent = active[depth - 1]
            if depth > 1 and not parent:
                continue
            child = self._child(parent, token)
            self._count[child] += 1
            self._list(parent, child)
            active[depth] = child
        self._used[0] += 1

    def children(self, node: int) -> list[int]:
        """Listed children of ``node``."""
        found = []
        child = self._best[node]
        while child:
            found.append(child)
            child = self._next[child]
        return found

    def _list(self, parent: int, child: int) -> None:
        """Move ``child``, whose count was increased, before the listed children that occur at most as often."""
        listed = self.children(parent)
        position = sum(self._count[other] > self._count[child] for other in listed if other != child)
        if position == LISTED:
            return
        if child in listed:
            listed.remove(child)
        listed.insert(position, child)
        self._best[parent] = listed[0]
        for one, other in zip(listed[:LISTED], [*listed[1:LISTED], 0], strict=True):
            self._next[one] = other

    def follow(self, active: Active, token: int) -> None:
        """Update ``active``, the suffixes of a sequence that the trie does not learn, for its next token."""
        for depth in range(len(active) - 1, 0, -1):
            parent = active[depth - 1]
            active[depth] = self._index[self._entry(parent, token)] if depth == 1 or parent else 0

    def _entry(self, parent: int, token: int) -> int:
        """Entry of that child in the index, or the empty entry for it."""
        index, size = self._index, len(self._index)
        entry = (parent * 0x9E3779B1 + token * 0x85EBCA6B) % size
        while node := index[entry]:
            if self._parent[node] == parent and self._token[node] == token:
                break
            entry = entry + 1 if entry + 1 < size else 0
        return entry

    def _child(self, parent: int, token: int) -> int:
        entry = self._entry(parent, token)
        if not self._index[entry]:
            self._used[1] += 1
            node = self._index[entry] = self._used[1]
            self._parent[node], self._token[node] = parent, token
        return self._index[entry]

    def propose(self, active: Active, longest: int, speculation: Speculation) -> Proposal:
        """At most ``longest`` drafts, and the cumulative probability of each. They follow the match with the largest
        expected number of accepted drafts; among equals the longer match."""
        drafts: list[int] = []
        scores: list[float] = []
        score = 0.0
        for matched in range(1, speculation.depth):
            if not active[matched]:
                continue
            found, chances = self._path(active[matched], speculation.most(matched, longest), speculation.least)
            if found and expected(chances) >= score:
                drafts, scores, score = found, chances, expected(chances)
        return drafts, scores

    def propose_tree(self, active: Active, nodes: int) -> TreeProposal:
        """The ``nodes`` likeliest tokens of the tree of all continuations of the matches, the likeliest first.

        The probability of a token after a match is its share of the counts there. A token that follows several matches
        has the greatest of its probabilities.
        """
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        # Among equal probabilities the first one is chosen: that of the longer match.
        order = itertools.count()
        heap: list[tuple[float, int, int, int]] = []

        def expand(node: int, into: int, chance: float) -> None:
            for child in self.children(node):
                share = chance * self._count[child] / self._count[node]
                heapq.heappush(heap, (-share, next(order), child, into))

        for match in self._matches(active):
            expand(match, 0, 1.0)
        while heap and len(tokens) < nodes:
            negative, _, child, into = heapq.heappop(heap)
            token = self._token[child]
            known = (i for i, pair in enumerate(zip(parents, tokens, strict=True)) if pair == (into, token))
            if (place := next(known, None)) is None:
                place = len(tokens)
                tokens.append(token)
                parents.append(into)
                chances.append(-negative)
            expand(child, place + 1, -negative)
        return tokens, parents, chances

    def _matches(self, active: Active) -> list[int]:
        """Nodes of the suffixes that have continuations, the longest first. Suffixes that occur equally often have the
        same continuations. Only the shortest of them is returned: its continuations are the longest in the trie.
        """
        found: list[int] = []
        for node in active[1:-1]:
            if not node or not self._best[node]:
                break
            if not found or self._count[node] < self._count[found[-1]]:
                found.append(node)
        return found[::-1]

    def _path(self, node: int, most: int, least: float) -> Proposal:
        count, best, token = self._count, self._best, self._token
        drafts: list[int] = []
        chances: list[float] = []
        chance = 1.0
        while len(drafts) < most and (child := best[node]):
            chance *= count[child] / count[node]
            if chance < least:
                break
            drafts.append(token[child])
            chances.append(chance)
            node = child
        return drafts, chances

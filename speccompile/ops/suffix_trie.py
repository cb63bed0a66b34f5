"""A trie of all substrings of texts, up to a depth, with how often each occurs: what suffix decoding drafts from.

After Oliaro et al., "SuffixDecoding" (2024), and Snowflake's ArcticInference. One token costs as many steps as the trie
is deep, for a text of any length, and S tokens have at most ``S * depth`` nodes: state is bounded, lies in the
arena, and is the same whether a text came at once or token by token.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speccompile.ops.tree import TreeProposal

#: What is kept of a node: its parent, token and count, the first of its listed children, and the next of its parent's.
PARENT, TOKEN, COUNT, BEST, NEXT = range(5)
#: How many numbers these are.
FIELDS = 5
#: Children of a node that are listed: the most frequent ones, the newest of equals first.
LISTED = 8
#: Between two texts that lie one after the other.
SEPARATOR = -1

#: Nodes of a text's suffixes in a trie, by length, ``[depth + 1]``: 0 for the empty suffix, and for one without a node.
Active = memoryview


@dataclass(frozen=True)
class Speculation:
    """Limits on the drafts that follow a match.

    Args:
        depth: of the trie: longest match and the drafts after it, together.
        factor, offset: of a match of m tokens follow at most ``factor * m + offset`` drafts.
        least: drafts end before one whose cumulative probability is below this.
    """

    depth: int
    factor: float
    offset: float
    least: float

    def most(self, matched: int, longest: int) -> int:
        """Drafts after a match of ``matched`` tokens."""
        return min(longest, int(matched * self.factor + self.offset + 1e-6), self.depth - matched)


Proposal = tuple[list[int], list[float]]


def expected(chances: Sequence[float]) -> float:
    """Expected number of accepted drafts, added up in order (``sum`` of Python 3.12 rounds in another way)."""
    total = 0.0
    for chance in chances:
        total += chance
    return total


class Trie:
    """One trie, over tables of the arena. Node 0 is the root, which counts nothing.

    Args:
        used: ``[2]``, tokens that were learned, and nodes.
        nodes: ``[5, nodes]``: :data:`PARENT` to :data:`NEXT` of each.
        index: a hash table from parent and token to node, 0 where it is empty.
    """

    def __init__(self, used: torch.Tensor, nodes: torch.Tensor, index: torch.Tensor) -> None:
        self._tables = used, nodes, index
        # Element by element a memoryview is several times as fast as an array.
        self._used, self._index = used.numpy().data, index.numpy().data
        self._parent, self._token, self._count, self._best, self._next = (row.numpy().data for row in nodes)

    @property
    def tokens(self) -> int:
        """Number of tokens in the trie."""
        return int(self._used[0])

    @property
    def size(self) -> int:
        """Nodes beside the root."""
        return int(self._used[1])

    def clear(self) -> None:
        """Remove all tokens; the tables keep their addresses."""
        for table in self._tables:
            table.zero_()

    def learn(self, active: Active, token: int) -> None:
        """Add a token of the text whose suffixes are ``active``."""
        # Longest first: a child hangs on the suffix as it was without this token.
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
        """Its listed children."""
        found = []
        child = self._best[node]
        while child:
            found.append(child)
            child = self._next[child]
        return found

    def _list(self, parent: int, child: int) -> None:
        """Put ``child``, whose count has just grown, before the listed children that occur no more often."""
        listed = self.children(parent)
        place = sum(self._count[other] > self._count[child] for other in listed if other != child)
        if place == LISTED:
            return
        if child in listed:
            listed.remove(child)
        listed.insert(place, child)
        self._best[parent] = listed[0]
        for one, other in zip(listed[:LISTED], [*listed[1:LISTED], 0], strict=True):
            self._next[one] = other

    def follow(self, active: Active, token: int) -> None:
        """Update ``active``, the suffixes of a text that the trie does not learn, for its next token."""
        for depth in range(len(active) - 1, 0, -1):
            parent = active[depth - 1]
            active[depth] = self._index[self._place(parent, token)] if depth == 1 or parent else 0

    def _place(self, parent: int, token: int) -> int:
        """Slot of that child in the index, or the empty slot for it."""
        index, size = self._index, len(self._index)
        place = (parent * 0x9E3779B1 + token * 0x85EBCA6B) % size
        while node := index[place]:
            if self._parent[node] == parent and self._token[node] == token:
                break
            place = place + 1 if place + 1 < size else 0
        return place

    def _child(self, parent: int, token: int) -> int:
        place = self._place(parent, token)
        if not self._index[place]:
            self._used[1] += 1
            node = self._index[place] = self._used[1]
            self._parent[node], self._token[node] = parent, token
        return self._index[place]

    def propose(self, active: Active, longest: int, speculation: Speculation) -> Proposal:
        """At most ``longest`` drafts, and the cumulative probability of each; of all matches' the ones that expect most
        right drafts, of equals those after the longer match."""
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
        """The ``nodes`` likeliest tokens of the tree of all that followed the matches, best first.

        The probability of a token after a match is its share of the counts there. A token that follows several matches
        has the greatest of its probabilities.
        """
        tokens: list[int] = []
        parents: list[int] = []
        chances: list[float] = []
        # Of equal probabilities the first to come: that of the longer match.
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
        """The nodes of the suffixes that something followed, the longest first. Suffixes that occur equally often were
        followed by the same tokens; only the shortest of them, whose continuations are the longest, is returned.
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

"""A trie of all substrings of texts, up to a depth, with how often each occurs: what suffix decoding drafts from.

After Oliaro et al., "SuffixDecoding" (2024), and Snowflake's ArcticInference. One token costs as many steps as the trie
is deep, for a text of any length, and S tokens have at most ``S * depth`` nodes: state is bounded, lies in the
arena, and is the same whether a text came at once or token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from speccompile.ops.tree import TreeProposal, merged

#: What is kept of a node.
PARENT, TOKEN, COUNT, BEST = range(4)
#: Between two texts that lie one after the other.
SEPARATOR = -1

#: A text's suffixes as nodes of a trie, by length, ``[depth + 1]``: 0 where there is none, and for the empty one.
Active = memoryview


@dataclass(frozen=True)
class Speculation:
    """How far to follow a trie.

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
    """How many drafts are expected to be right, added up in order (``sum`` of Python 3.12 rounds in another way)."""
    total = 0.0
    for chance in chances:
        total += chance
    return total


class Trie:
    """One trie, over tables of the arena. Node 0 is the root, which counts nothing.

    Args:
        used: ``[2]``, tokens that were learned, and nodes.
        nodes: ``[4, nodes]``: parent, token, count and most frequent child of each, the newest of equals.
        index: a hash table from parent and token to node, 0 where it is empty.
    """

    def __init__(self, used: torch.Tensor, nodes: torch.Tensor, index: torch.Tensor) -> None:
        self._tables = used, nodes, index
        # Element by element a memoryview is several times as fast as an array.
        self._used, self._index = used.numpy().data, index.numpy().data
        self._parent, self._token, self._count, self._best = (row.numpy().data for row in nodes)

    @property
    def tokens(self) -> int:
        return int(self._used[0])

    @property
    def size(self) -> int:
        """Nodes beside the root."""
        return int(self._used[1])

    def clear(self) -> None:
        for table in self._tables:
            table.zero_()

    def learn(self, active: Active, token: int) -> None:
        """One more token of the text whose suffixes are ``active``."""
        count, best = self._count, self._best
        # Longest first: a child hangs on the suffix as it was without this token.
        for depth in range(len(active) - 1, 0, -1):
            parent = active[depth - 1]
            if depth > 1 and not parent:
                continue
            child = self._child(parent, token)
            count[child] += 1
            if not best[parent] or count[child] >= count[best[parent]]:
                best[parent] = child
            active[depth] = child
        self._used[0] += 1

    def follow(self, active: Active, token: int) -> None:
        """The same of a text that is not learned from."""
        for depth in range(len(active) - 1, 0, -1):
            parent = active[depth - 1]
            active[depth] = self._index[self._place(parent, token)] if depth == 1 or parent else 0

    def _place(self, parent: int, token: int) -> int:
        """Where the index has that child, or would have it."""
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

    def propose_tree(self, active: Active, nodes: int, speculation: Speculation) -> TreeProposal:
        """The paths of all matches, the longest match first, as one tree of at most ``nodes`` tokens."""
        found = [matched for matched in range(speculation.depth - 1, 0, -1) if active[matched]]
        most, least = speculation.most, speculation.least
        return merged([self._path(active[matched], most(matched, nodes), least) for matched in found], nodes)

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


def search(learned: Sequence[Sequence[int]], known: Sequence[int], longest: int, speculation: Speculation) -> Proposal:
    """What :meth:`Trie.propose` proposes after the text ``known``, by looking through all texts that it ``learned``
    again and again. They were learned one after another."""
    drafts: list[int] = []
    scores: list[float] = []
    for matched in range(1, min(len(known), speculation.depth - 1) + 1):
        most = speculation.most(matched, longest)
        found, chances = _searched(learned, list(known[-matched:]), most, speculation.least)
        if found and expected(chances) >= expected(scores):
            drafts, scores = found, chances
    return drafts, scores


def _searched(learned: Sequence[Sequence[int]], pattern: list[int], most: int, least: float) -> Proposal:
    drafts: list[int] = []
    chances: list[float] = []
    chance = 1.0
    while len(drafts) < most:
        width = len(pattern)
        ends = [
            (text, end)
            for text in learned
            for end in range(width, len(text) + 1)
            if list(text[end - width : end]) == pattern
        ]
        followed = [text[end] for text, end in ends if end < len(text)]
        if not followed:
            break
        newest = {token: place for place, token in enumerate(followed)}
        token = max(newest, key=lambda token: (followed.count(token), newest[token]))
        chance *= followed.count(token) / len(ends)
        if chance < least:
            break
        drafts.append(token)
        chances.append(chance)
        pattern = [*pattern, token]
    return drafts, chances

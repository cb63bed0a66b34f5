"""A trie of all substrings of a text, up to a depth, with how often each occurs: what suffix decoding drafts from.

After Oliaro et al., "SuffixDecoding" (2024), and Snowflake's ArcticInference. One token costs as many steps as the trie
is deep, whatever the length of the text, and a text of S tokens has at most ``S * depth`` nodes: state is bounded, lies
in the arena, and is the same whether a text came at once or token by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_library = torch.library.Library("speccompile", "FRAGMENT")

#: What is kept of a node.
PARENT, TOKEN, COUNT, BEST = range(4)


@dataclass(frozen=True)
class Speculation:
    """How far to follow a trie.

    Args:
        depth: of the trie: longest match and the drafts behind it, together.
        factor, offset: of a match of m tokens follow at most ``factor * m + offset`` drafts.
        least: drafts end in front of one whose cumulative probability is below this.
    """

    depth: int
    factor: float
    offset: float
    least: float

    def most(self, matched: int, longest: int) -> int:
        """Drafts behind a match of ``matched`` tokens."""
        return min(longest, int(matched * self.factor + self.offset + 1e-6), self.depth - matched)


class Trie:
    """One slot's, over tables of the arena. Node 0 is the root, which counts nothing.

    Args:
        used: ``[2]``, tokens that were read, and nodes.
        active: ``[depth + 1]``, the nodes of the text's suffixes by length; 0 where there is none.
        nodes: ``[4, nodes]``: parent, token, count and most frequent child of each, the newest of equals.
        index: a hash table from parent and token to node, 0 where it is empty.
    """

    def __init__(self, used: torch.Tensor, active: torch.Tensor, nodes: torch.Tensor, index: torch.Tensor) -> None:
        self._tables = used, active, nodes, index
        # Element by element a memoryview is several times as fast as an array.
        self._used, self._active, self._index = (table.numpy().data for table in (used, active, index))
        self._parent, self._token, self._count, self._best = (row.numpy().data for row in nodes)

    @property
    def read(self) -> int:
        return int(self._used[0])

    def clear(self) -> None:
        for table in self._tables:
            table.zero_()

    def add(self, token: int) -> None:
        """One more token of the text."""
        active, count, best = self._active, self._count, self._best
        read = self._used[0]
        # Longest first: a child hangs on the suffix as it was without this token.
        for depth in range(min(len(active) - 1, read + 1), 0, -1):
            parent = active[depth - 1]
            child = self._child(parent, token)
            count[child] += 1
            if not best[parent] or count[child] >= count[best[parent]]:
                best[parent] = child
            active[depth] = child
        self._used[0] = read + 1

    def _child(self, parent: int, token: int) -> int:
        index, size = self._index, len(self._index)
        place = (parent * 0x9E3779B1 + token * 0x85EBCA6B) % size
        while node := index[place]:
            if self._parent[node] == parent and self._token[node] == token:
                return node
            place = place + 1 if place + 1 < size else 0
        self._used[1] += 1
        node = index[place] = self._used[1]
        self._parent[node], self._token[node] = parent, token
        return node

    def propose(self, longest: int, speculation: Speculation) -> tuple[list[int], list[float]]:
        """At most ``longest`` drafts, and the cumulative probability of each; of all matches' the ones whose sum, which
        is how many are expected to be right, is largest, of equals those behind the longer match."""
        drafts: list[int] = []
        scores: list[float] = []
        score = 0.0
        for matched in range(1, min(self.read, speculation.depth - 1) + 1):
            found, chances = self._follow(self._active[matched], speculation.most(matched, longest), speculation.least)
            if found and sum(chances) >= score:
                drafts, scores, score = found, chances, sum(chances)
        return drafts, scores

    def _follow(self, node: int, most: int, least: float) -> tuple[list[int], list[float]]:
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


def reference(text: Sequence[int], longest: int, speculation: Speculation) -> tuple[list[int], list[float]]:
    """What :meth:`Trie.propose` proposes, by looking through the whole text again and again."""
    drafts: list[int] = []
    scores: list[float] = []
    for matched in range(1, min(len(text), speculation.depth - 1) + 1):
        found, chances = _searched(list(text), matched, speculation.most(matched, longest), speculation.least)
        if found and sum(chances) >= sum(scores):
            drafts, scores = found, chances
    return drafts, scores


def _searched(text: list[int], matched: int, most: int, least: float) -> tuple[list[int], list[float]]:
    drafts: list[int] = []
    chances: list[float] = []
    pattern, chance = text[-matched:], 1.0
    while len(drafts) < most:
        ends = [end for end in range(len(pattern), len(text) + 1) if text[end - len(pattern) : end] == pattern]
        followed = [text[end] for end in ends if end < len(text)]
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


def draft(
    used: torch.Tensor,
    active: torch.Tensor,
    nodes: torch.Tensor,
    index: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Read what is new of the rows' texts ``tokens [B, S]`` and ``length [B]`` into their slots' tries, and propose.

    Returns:
        Drafts, int64 ``[B, longest]``, how many there are, int64 ``[B]``, and their scores, float32 ``[B, longest]``.
    """
    speculation = Speculation(active.shape[1] - 1, factor, offset, least)
    drafts, lens, scores = _empty(slots, longest)
    lengths = length.tolist()
    for row, slot in enumerate(slots.tolist()):
        trie = Trie(used[slot], active[slot], nodes[slot], index[slot])
        if trie.read > lengths[row]:
            trie.clear()
        for token in tokens[row, trie.read : lengths[row]].tolist():
            trie.add(token)
        found, chances = trie.propose(longest, speculation)
        lens[row] = len(found)
        drafts[row, : len(found)] = torch.tensor(found, dtype=drafts.dtype)
        scores[row, : len(found)] = torch.tensor(chances, dtype=scores.dtype)
    return drafts, lens, scores


def _empty(slots: torch.Tensor, longest: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = slots.shape[0]
    return (
        slots.new_zeros((rows, longest)),
        slots.new_zeros(rows),
        slots.new_zeros((rows, longest), dtype=torch.float32),
    )


def _fake(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    slots, longest = arguments[4], arguments[7]
    assert isinstance(slots, torch.Tensor) and isinstance(longest, int)
    return _empty(slots, longest)


_library.define(
    "suffix_draft_(Tensor(a!) used, Tensor(b!) active, Tensor(c!) nodes, Tensor(d!) index, Tensor slots, "
    "Tensor tokens, Tensor length, int longest, float factor, float offset, float least) -> (Tensor, Tensor, Tensor)"
)
_library.impl("suffix_draft_", draft, "CPU")
torch.library.register_fake("speccompile::suffix_draft_", _fake, lib=_library)

"""Suffix decoding by a search through all learned sequences."""

from __future__ import annotations

from collections.abc import Sequence

from speccompile.ops.suffix_trie import Proposal, Speculation, expected


def search(learned: Sequence[Sequence[int]], known: Sequence[int], longest: int, speculation: Speculation) -> Proposal:
    """The proposal of ``Trie.propose`` after ``known``, found by a search through all sequences, learned in order."""
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

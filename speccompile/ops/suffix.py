"""Drafts of suffix decoding: from a row's own text, from texts that were given, and from texts of earlier requests.

Each op reads what is new of its rows' texts and proposes. These are the definitions, in Python; on a CPU the ops are
C++ (``ops/cpu/csrc/base/kernels/suffix.cpp``), over the same tables.

Shapes: ``B`` rows, ``N`` slots (the last one is the dummy's, whose text is never learned from), ``D`` depth. Tables are
int32. ``tokens [B, S]`` and ``length [B]`` are the rows' texts, ``slots [B]`` theirs. All return drafts, int64
``[B, longest]``, how many there are, int64 ``[B]``, and their cumulative probabilities, float32 ``[B, longest]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.suffix_trie import SEPARATOR, Proposal, Speculation, Trie, expected

_ROWS = "Tensor slots, Tensor tokens, Tensor length, int longest, float factor, float offset, float least"
_OUT = " -> (Tensor, Tensor, Tensor)"
#: Of each op the schema, and how many arguments stand before ``slots``.
SCHEMAS = {
    "suffix_draft_": ("(Tensor(a!) used, Tensor(b!) active, Tensor(c!) nodes, Tensor(d!) index, ", 4),
    "suffix_given_": (
        "(Tensor text, Tensor(a!) used, Tensor(b!) nodes, Tensor(c!) index, Tensor(d!) cursor, ",
        5,
    ),
    "suffix_earlier_": ("(Tensor(a!) used, Tensor(b!) nodes, Tensor(c!) index, Tensor(d!) cursor, int room, ", 5),
}
#: The op that proposes trees.
TREE = "suffix_tree"
_TREE_SCHEMA = "(Tensor nodes, Tensor which, Tensor suffixes, int longest) -> (Tensor, Tensor, Tensor, Tensor)"

Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def own(
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
) -> Drafts:
    """From the row's own text: a trie a slot, ``used [N, 2]``, ``active [N, D + 1]``, ``nodes [N, 5, ...]``,
    ``index [N, ...]``."""
    speculation = Speculation(active.shape[1] - 1, factor, offset, least)
    proposals = []
    for row, (slot, count) in enumerate(zip(slots.tolist(), length.tolist(), strict=True)):
        trie, suffixes = Trie(used[slot], nodes[slot], index[slot]), active[slot].numpy().data
        if trie.tokens > count:
            trie.clear()
            active[slot].zero_()
        for token in tokens[row, trie.tokens : count].tolist():
            trie.learn(suffixes, token)
        proposals.append(trie.propose(suffixes, longest, speculation))
    return _as_tensors(slots, longest, proposals)


def given(
    text: torch.Tensor,
    used: torch.Tensor,
    nodes: torch.Tensor,
    index: torch.Tensor,
    cursor: torch.Tensor,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> Drafts:
    """From ``text [C]``, texts with -1 between them, which the first call reads: one trie, ``used [2]``,
    ``nodes [5, ...]``, ``index [...]``. ``cursor [N, D + 2]``: for each slot the number of tokens that were read, and
    its suffixes in the trie.
    """
    depth = cursor.shape[1] - 2
    speculation = Speculation(depth, factor, offset, least)
    trie = Trie(used, nodes, index)
    if not trie.tokens:
        begun = torch.zeros(depth + 1, dtype=torch.int32)
        for token in text.tolist():
            if token == SEPARATOR:
                begun.zero_()
            else:
                trie.learn(begun.numpy().data, token)
    proposals = []
    for row, (slot, count) in enumerate(zip(slots.tolist(), length.tolist(), strict=True)):
        if int(cursor[slot, 0]) > count:
            cursor[slot].zero_()
        suffixes = cursor[slot, 1:].numpy().data
        for token in tokens[row, int(cursor[slot, 0]) : count].tolist():
            trie.follow(suffixes, token)
        cursor[slot, 0] = count
        proposals.append(trie.propose(suffixes, longest, speculation))
    return _as_tensors(slots, longest, proposals)


def earlier(
    used: torch.Tensor,
    nodes: torch.Tensor,
    index: torch.Tensor,
    cursor: torch.Tensor,
    room: int,
    slots: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> Drafts:
    """From the texts of all slots, also of finished requests. There are two tries of ``room`` tokens each: one learns;
    when it is full, the other one is emptied and learns. ``used [3, 2]``, ``used[2, 0]`` being the index of the trie
    that learns, ``nodes [2, 5, ...]``, ``index [2, ...]``, ``cursor [N, 1 + 2 * (D + 1)]``.
    """
    depth = (cursor.shape[1] - 1) // 2 - 1
    speculation = Speculation(depth, factor, offset, least)
    tries = [Trie(used[side], nodes[side], index[side]) for side in (0, 1)]
    parts = [slice(1, depth + 2), slice(depth + 2, 2 * depth + 3)]
    proposals: list[Proposal] = []
    for row, (slot, count) in enumerate(zip(slots.tolist(), length.tolist(), strict=True)):
        if slot == cursor.shape[0] - 1:
            proposals.append(([], []))
            continue
        if int(cursor[slot, 0]) > count:
            cursor[slot].zero_()
        for token in tokens[row, int(cursor[slot, 0]) : count].tolist():
            young = int(used[2, 0])
            if tries[young].tokens >= room:
                young = 1 - young
                used[2, 0] = young
                tries[young].clear()
                cursor[:, parts[young]] = 0
            tries[young].learn(cursor[slot, parts[young]].numpy().data, token)
            tries[1 - young].follow(cursor[slot, parts[1 - young]].numpy().data, token)
        cursor[slot, 0] = count
        young = int(used[2, 0])
        newer, older = (
            tries[side].propose(cursor[slot, parts[side]].numpy().data, longest, speculation)
            for side in (young, 1 - young)
        )
        proposals.append(older if expected(older[1]) > expected(newer[1]) else newer)
    return _as_tensors(slots, longest, proposals)


def tree(
    nodes: torch.Tensor, which: torch.Tensor, suffixes: torch.Tensor, longest: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Trees of drafts after texts that were learned or followed before.

    Args:
        nodes: ``[X, 5, ...]``, several tries; which: int64 ``[B]``, the trie of each row.
        suffixes: ``[B, D + 1]``, of each row's text in it.
        longest: most tokens, P.

    Returns:
        Tokens and parents, int64 ``[B, P]``, as :meth:`~speccompile.ops.suffix_trie.Trie.propose_tree` has them; how
        many there are, int64 ``[B]``; their cumulative probabilities, float32 ``[B, P]``.
    """
    tokens, count, scores = _empty(which, longest)
    parents, unused = torch.zeros_like(tokens), nodes.new_zeros(2)
    for row, trie in enumerate(which.tolist()):
        found = Trie(unused, nodes[trie], unused).propose_tree(suffixes[row].numpy().data, longest)
        count[row] = len(found[0])
        for into, values in ((tokens, found[0]), (parents, found[1]), (scores, found[2])):
            into[row, : len(values)] = torch.tensor(values, dtype=into.dtype)
    return tokens, parents, count, scores


def _as_tensors(slots: torch.Tensor, longest: int, proposals: list[Proposal]) -> Drafts:
    drafts, lens, scores = _empty(slots, longest)
    for row, (found, chances) in enumerate(proposals):
        lens[row] = len(found)
        drafts[row, : len(found)] = torch.tensor(found, dtype=drafts.dtype)
        scores[row, : len(found)] = torch.tensor(chances, dtype=scores.dtype)
    return drafts, lens, scores


def _empty(slots: torch.Tensor, longest: int) -> Drafts:
    rows = slots.shape[0]
    return (
        slots.new_zeros((rows, longest)),
        slots.new_zeros(rows),
        slots.new_zeros((rows, longest), dtype=torch.float32),
    )


def _define(name: str, definition: Callable[..., Drafts]) -> None:
    front, count = SCHEMAS[name]

    def fake(*arguments: object) -> Drafts:
        slots, longest = arguments[count], arguments[count + 3]
        assert isinstance(slots, torch.Tensor) and isinstance(longest, int)
        return _empty(slots, longest)

    define(name + front + _ROWS + ")" + _OUT, fake, definition, cpp=BASE)


def _tree_fake(nodes, which, suffixes, longest):  # type: ignore[no-untyped-def]
    tokens, count, scores = _empty(which, longest)
    return tokens, torch.empty_like(tokens), count, scores


for _name, _definition in (("suffix_draft_", own), ("suffix_given_", given), ("suffix_earlier_", earlier)):
    _define(_name, _definition)
define(TREE + _TREE_SCHEMA, _tree_fake, tree, cpp=BASE)

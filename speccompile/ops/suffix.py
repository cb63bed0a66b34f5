"""Drafts of suffix decoding: from a row's own sequence, from given texts, and from sequences of earlier requests.

Each op adds the new tokens of its rows to its tables, and proposes drafts. The functions of this file are the
references. On a CPU the ops are C++ (``ops/cpu/csrc/base/kernels/suffix.cpp``), over the same tables.

Shapes: ``B`` rows, ``N`` slots, ``D`` depth. The last slot is the dummy, and nothing learns from its sequence. Tables
are int32, and ``slots [B]`` are the rows' slots in them. ``tokens [X, S]`` and ``length [X]`` are sequences, and
``places [B]`` has the one of each row: X is N or B. All ops return drafts, int64 ``[B, longest]``, how many there are,
int64 ``[B]``, and the cumulative probability of each, float32 ``[B, longest]``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from speccompile.ops.cpu.library import BASE
from speccompile.ops.define import define
from speccompile.ops.suffix_trie import SEPARATOR, Proposal, Speculation, Trie, expected

_ROWS = (
    "Tensor slots, Tensor places, Tensor tokens, Tensor length, int longest, float factor, float offset, float least"
)
_OUT = " -> (Tensor, Tensor, Tensor)"
#: The schema of each op up to ``slots``, and its number of arguments before ``slots``.
SCHEMAS = {
    "suffix_draft_": ("(Tensor(a!) used, Tensor(b!) active, Tensor(c!) nodes, Tensor(d!) index, ", 4),
    "suffix_given_": (
        "(Tensor text, Tensor(a!) used, Tensor(b!) nodes, Tensor(c!) index, Tensor(d!) cursor, ",
        5,
    ),
    "suffix_earlier_": ("(Tensor(a!) used, Tensor(b!) nodes, Tensor(c!) index, Tensor(d!) cursor, int capacity, ", 5),
}
#: The op that proposes trees.
TREE = "suffix_tree"
_TREE_SCHEMA = (
    "(Tensor nodes, Tensor which, Tensor cursor, Tensor slots, int first, int count, int longest) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)

Drafts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def own(
    used: torch.Tensor,
    active: torch.Tensor,
    nodes: torch.Tensor,
    index: torch.Tensor,
    slots: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> Drafts:
    """Draft from the row's own sequence, with a trie for each slot: ``used [N, 2]``, ``active [N, D + 1]``,
    ``nodes [N, 5, ...]``, ``index [N, ...]``."""
    speculation = Speculation(active.shape[1] - 1, factor, offset, least)
    proposals = []
    for slot, place, count in zip(slots.tolist(), places.tolist(), length[places].tolist(), strict=True):
        trie, suffixes = Trie(used[slot], nodes[slot], index[slot]), active[slot].numpy().data
        if trie.tokens > count:
            trie.clear()
            active[slot].zero_()
        for token in tokens[place, trie.tokens : count].tolist():
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
    places: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> Drafts:
    """Draft from ``text [C]``: given texts, separated by -1. The first call adds them to one trie, ``used [2]``,
    ``nodes [5, ...]``, ``index [...]``. ``cursor [N, D + 2]`` holds for each slot the number of tokens that were read,
    and its suffixes in the trie.
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
    for slot, place, count in zip(slots.tolist(), places.tolist(), length[places].tolist(), strict=True):
        if int(cursor[slot, 0]) > count:
            cursor[slot].zero_()
        suffixes = cursor[slot, 1:].numpy().data
        for token in tokens[place, int(cursor[slot, 0]) : count].tolist():
            trie.follow(suffixes, token)
        cursor[slot, 0] = count
        proposals.append(trie.propose(suffixes, longest, speculation))
    return _as_tensors(slots, longest, proposals)


def earlier(
    used: torch.Tensor,
    nodes: torch.Tensor,
    index: torch.Tensor,
    cursor: torch.Tensor,
    capacity: int,
    slots: torch.Tensor,
    places: torch.Tensor,
    tokens: torch.Tensor,
    length: torch.Tensor,
    longest: int,
    factor: float,
    offset: float,
    least: float,
) -> Drafts:
    """Draft from the sequences of all slots, also those of finished requests.

    There are two tries of ``capacity`` tokens each, and one of them learns. When it is full, the other one is cleared
    and learns. ``used [3, 2]``, ``nodes [2, 5, ...]``, ``index [2, ...]``, ``cursor [N, 1 + 2 * (D + 1)]``;
    ``used[2, 0]`` is the index of the trie that learns.
    """
    depth = (cursor.shape[1] - 1) // 2 - 1
    speculation = Speculation(depth, factor, offset, least)
    tries = [Trie(used[side], nodes[side], index[side]) for side in (0, 1)]
    parts = [slice(1, depth + 2), slice(depth + 2, 2 * depth + 3)]
    proposals: list[Proposal] = []
    for slot, place, count in zip(slots.tolist(), places.tolist(), length[places].tolist(), strict=True):
        if slot == cursor.shape[0] - 1:
            proposals.append(([], []))
            continue
        if int(cursor[slot, 0]) > count:
            cursor[slot].zero_()
        for token in tokens[place, int(cursor[slot, 0]) : count].tolist():
            young = int(used[2, 0])
            if tries[young].tokens >= capacity:
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
    nodes: torch.Tensor,
    which: torch.Tensor,
    cursor: torch.Tensor,
    slots: torch.Tensor,
    first: int,
    count: int,
    longest: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Propose trees of drafts for sequences whose tokens are in a trie already.

    Args:
        nodes: ``[X, 5, ...]``, several tries.
        which: int64 ``[B]``, the trie of each row.
        cursor: ``[N, ...]``; slots: int64 ``[B]``. A row's suffixes have the ``count`` nodes of its trie from
            ``cursor[slot, first]`` on.
        longest: the largest number of tokens, P.

    Returns:
        Tokens and parents, int64 ``[B, P]``, in the form of :meth:`~speccompile.ops.suffix_trie.Trie.propose_tree`; the
        number of tokens, int64 ``[B]``; the cumulative probability of each, float32 ``[B, P]``.
    """
    tokens, counts, scores = _empty(which, longest)
    parents, unused = torch.zeros_like(tokens), nodes.new_zeros(2)
    for row, (trie, slot) in enumerate(zip(which.tolist(), slots.tolist(), strict=True)):
        suffixes = cursor[slot, first : first + count]
        found = Trie(unused, nodes[trie], unused).propose_tree(suffixes.numpy().data, longest)
        counts[row] = len(found[0])
        for into, values in ((tokens, found[0]), (parents, found[1]), (scores, found[2])):
            into[row, : len(values)] = torch.tensor(values, dtype=into.dtype)
    return tokens, parents, counts, scores


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
        slots, longest = arguments[count], arguments[count + 4]
        assert isinstance(slots, torch.Tensor) and isinstance(longest, int)
        return _empty(slots, longest)

    define(name + front + _ROWS + ")" + _OUT, fake, definition, cpp=BASE, recorded=True)


def _tree_fake(nodes, which, cursor, slots, first, count, longest):  # type: ignore[no-untyped-def]
    tokens, counts, scores = _empty(which, longest)
    return tokens, torch.empty_like(tokens), counts, scores


for _name, _definition in (("suffix_draft_", own), ("suffix_given_", given), ("suffix_earlier_", earlier)):
    _define(_name, _definition)
define(TREE + _TREE_SCHEMA, _tree_fake, tree, cpp=BASE, recorded=True)

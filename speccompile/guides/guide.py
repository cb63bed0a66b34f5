"""A guide: a finite automaton over token ids, as two tables."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F

from speccompile.errors import InvalidGuide

#: No move: the token is not allowed in this state.
DEAD = -1
#: No move, in a state where the text is complete and only an EOS token may follow. Only the last column of
#: :meth:`Guide.tables` has it.
COMPLETE = -2
#: Largest number of table entries that merging of states may read: about two seconds.
_MOST_MERGE_WORK = 2**28
_FACTOR = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, eq=False)
class Guide:
    """Allowed tokens of each state, and the next state for each. State 0 is the start.

    Tokens with equal moves in every state share a class, which keeps the table of moves small.

    Args:
        text: pattern or schema that the guide was built from, for messages.
        classes: int16 ``[V]``, the class of each token id; V is the tokenizer's vocabulary size.
        moves: int16 ``[states, classes]``, the next state, or -1.
        final: bool ``[states]``, True if the text may end in that state.
    """

    text: str = field(repr=False)
    classes: torch.Tensor = field(repr=False)
    moves: torch.Tensor = field(repr=False)
    final: torch.Tensor = field(repr=False)

    @property
    def states(self) -> int:
        """Number of states of the automaton."""
        return self.moves.shape[0]

    @property
    def table_size(self) -> int:
        """Number of entries that :meth:`tables` occupies in a slot."""
        return self.states * (self.moves.shape[1] + 2)

    def matches(self, ids: list[int], *, whole: bool = True) -> bool:
        """Return whether ``ids`` are allowed from the start and, with ``whole``, end in a final state."""
        state = 0
        for token in ids:
            if not 0 <= token < len(self.classes):
                return False
            state = int(self.moves[state, int(self.classes[token])])
            if state == DEAD:
                return False
        return bool(self.final[state]) or not whole

    def tables(self, eos: tuple[int, ...], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Build the tables of a request: classes ``[vocab_size]`` and moves ``[states, classes + 2]``.

        An EOS token is allowed in final states and does not change the state. Ids that the tokenizer does not know are
        never allowed. Their column, the last one, marks the states in which a text is complete.

        Raises:
            InvalidGuide: an EOS token ends a text wherever it occurs, and without EOS tokens nothing matches.
        """
        return _tables(self, eos, vocab_size)

    @staticmethod
    def of_transitions(
        text: str, start: int, transitions: Mapping[int, Mapping[int, int]], final: set[int], vocab_size: int
    ) -> Guide:
        """Build a guide from transitions ``state -> token -> state``. States that lead to no final state are left out.

        Raises:
            InvalidGuide: no sequence of these tokens reaches a final state, or there are too many states.
        """
        useful = _coaccessible(transitions, final)
        if start not in useful:
            raise InvalidGuide(what=text, reason="no sequence of the tokenizer's tokens matches it")
        numbers = {state: index for index, state in enumerate([start, *sorted(useful - {start})])}
        if len(numbers) > np.iinfo(np.int16).max:
            raise InvalidGuide(what=text, reason=f"its automaton has {len(numbers)} states; simplify it")
        rows = np.full((len(numbers), vocab_size), DEAD, dtype=np.int16)
        number_of = np.full(1 + max(transitions.keys() | useful), DEAD, dtype=np.int16)
        number_of[list(numbers)] = list(numbers.values())
        for state, index in numbers.items():
            moves = transitions.get(state, {})
            tokens = np.fromiter(moves.keys(), dtype=np.int64, count=len(moves))
            targets = np.fromiter(moves.values(), dtype=np.int64, count=len(moves))
            known = targets < len(number_of)
            rows[index, tokens[known]] = number_of[targets[known]]
        classes, moves_of_class = _classes(rows)
        moves_of_class, ends = _merged(moves_of_class, np.array([state in final for state in numbers]))
        # Some tokens differed only in states that are now merged.
        joined, moves_of_class = _classes(moves_of_class)
        return Guide(text, torch.from_numpy(joined[classes]), torch.from_numpy(moves_of_class), torch.from_numpy(ends))


def _coaccessible(transitions: Mapping[int, Mapping[int, int]], final: set[int]) -> set[int]:
    before: dict[int, set[int]] = {}
    for state, moves in transitions.items():
        for to in set(moves.values()):
            before.setdefault(to, set()).add(state)
    useful, border = set(final), list(final)
    while border:
        new = before.get(border.pop(), set()) - useful
        useful |= new
        border += new
    return useful


def _merged(moves: np.ndarray, final: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Merge states that accept the same continuations; return new ``moves`` and ``final``. State 0 stays the first.

    Moore's algorithm: blocks of states are split by their next states until no block changes. If that is too much
    work, all states are kept.
    """
    weights = np.random.default_rng(0).integers(1, 2**63, size=moves.shape[1]).astype(np.uint64)
    blocks, count = final.astype(np.int32), 0
    for _ in range(_MOST_MERGE_WORK // max(moves.size, 1)):
        # DEAD is -1 and indexes the last entry.
        targets = np.append(blocks, DEAD).astype(np.int32)[moves]
        hashes = ((targets + 2).astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64) * _FACTOR
        _, first, refined = np.unique(hashes ^ blocks.astype(np.uint64), return_index=True, return_inverse=True)
        if len(first) == count:
            break
        blocks, count = refined.astype(np.int32), len(first)
    else:
        return moves, final
    if not np.array_equal(targets[first][refined], targets) or not np.array_equal(final[first][refined], final):
        return moves, final
    order = np.argsort(first)
    numbers = np.append(np.argsort(order), DEAD).astype(np.int16)
    return numbers[np.append(refined, DEAD)[moves[first[order]]]], final[first[order]]


def _classes(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Classes ``[V]`` of equal columns of ``rows`` ``[states, V]``, and one column of each, ``[states, classes]``."""
    # Sorting of hashes is a hundred times as fast as sorting of columns.
    hashes = np.zeros(rows.shape[1], dtype=np.uint64)
    for row in rows:
        hashes = (hashes ^ (row.astype(np.int64) + 2).astype(np.uint64)) * _FACTOR
        hashes ^= hashes >> np.uint64(29)
    _, first, classes = np.unique(hashes, return_index=True, return_inverse=True)
    if not all(np.array_equal(row[first][classes], row) for row in rows):
        _, first, classes = np.unique(rows, axis=1, return_index=True, return_inverse=True)
    # Each request adds two classes.
    if len(first) > np.iinfo(np.int16).max - 1:
        reason = f"its automaton distinguishes {len(first)} kinds of tokens; simplify it"
        raise InvalidGuide(what="the guide", reason=reason)
    return classes.astype(np.int16), np.ascontiguousarray(rows[:, first])


@functools.lru_cache(maxsize=64)
def _tables(guide: Guide, eos: tuple[int, ...], vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    states, count = guide.moves.shape
    ends = torch.where(guide.final, torch.arange(states), DEAD).to(torch.int16)
    own = _excluding(guide, eos)
    never = torch.where(guide.final & (own < 0).all(1), COMPLETE, DEAD).to(torch.int16)
    moves = torch.cat([own, ends[:, None], never[:, None]], dim=1)
    classes = F.pad(guide.classes, (0, vocab_size - len(guide.classes)), value=count + 1)
    classes[list(eos)] = count
    return classes, moves


def _excluding(guide: Guide, tokens: tuple[int, ...]) -> torch.Tensor:
    """Moves ``[states, classes]`` from which a final state can be reached without ``tokens``."""
    used = torch.ones(len(guide.classes), dtype=torch.bool)
    used[[token for token in tokens if token < len(used)]] = False
    moves = guide.moves.clone()
    moves[:, torch.bincount(guide.classes[used].long(), minlength=moves.shape[1]) == 0] = DEAD
    if torch.equal(moves, guide.moves):
        return moves
    transitions = {state: dict(enumerate(row)) for state, row in enumerate(moves.tolist())}
    ends = _coaccessible(transitions, set(guide.final.nonzero()[:, 0].tolist()))
    if 0 not in ends:
        raise InvalidGuide(what=guide.text, reason=f"it needs the EOS tokens {list(tokens)} as text")
    useful = torch.tensor([state in ends for state in range(guide.states)])
    return torch.where((moves >= 0) & useful[moves.long()], moves, DEAD)

"""The automaton itself, against a plain simulation."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from speccompile.errors import InvalidGuide
from speccompile.guides import Guide
from speccompile.guides.guide import COMPLETE, DEAD
from support.errors import raises

VOCAB = 6
Transitions = dict[int, dict[int, int]]

automata = st.integers(1, 5).flatmap(
    lambda states: st.tuples(
        st.dictionaries(
            st.integers(0, states - 1), st.dictionaries(st.integers(0, VOCAB - 1), st.integers(0, states - 1))
        ),
        st.sets(st.integers(0, states - 1)),
    )
)


def run(transitions: Transitions, ids: list[int]) -> int | None:
    state: int | None = 0
    for token in ids:
        state = None if state is None else transitions.get(state, {}).get(token)
    return state


def ends_from(transitions: Transitions, final: set[int], state: int | None) -> bool:
    """By looking at all that can be reached."""
    seen, border = set(), [state]
    while border:
        if (now := border.pop()) is None or now in seen:
            continue
        seen.add(now)
        border += transitions.get(now, {}).values()
    return bool(seen & final)


def kinds_of(transitions: Transitions, final: set[int], states: set[int]) -> int:
    """How many of ``states`` lead to different ends."""
    kinds: dict[int | None, int] = {state: int(state in final) for state in states}
    for _ in states:
        signs = {
            state: (kinds[state], *(kinds.get(transitions.get(state, {}).get(token)) for token in range(VOCAB)))
            for state in states
        }
        numbers = {sign: number for number, sign in enumerate(dict.fromkeys(signs.values()))}
        kinds = {state: numbers[sign] for state, sign in signs.items()}
    return len(set(kinds.values()))


@given(automaton=automata, texts=st.lists(st.lists(st.integers(-1, VOCAB)), max_size=10))
def test_matches_is_a_plain_simulation_without_dead_ends(
    automaton: tuple[Transitions, set[int]], texts: list[list[int]]
) -> None:
    transitions, final = automaton
    if not ends_from(transitions, final, 0):
        with raises(InvalidGuide, reason=re.compile("no sequence of the tokenizer's tokens matches it")):
            Guide.of_transitions("x", 0, transitions, final, VOCAB)
        return
    guide = Guide.of_transitions("x", 0, transitions, final, VOCAB)
    for ids in texts:
        state = run(transitions, ids)
        assert guide.matches(ids) == (state in final)
        assert guide.matches(ids, whole=False) == ends_from(transitions, final, state)
    useful = {state for state in {0, *transitions, *final} if ends_from(transitions, final, state)}
    assert guide.states == kinds_of(transitions, final, useful)
    columns = guide.moves.T.tolist()
    assert len({tuple(column) for column in columns}) == len(columns), "equal columns share a class"


@given(automaton=automata, eos=st.lists(st.integers(VOCAB, VOCAB + 3), min_size=1, max_size=3, unique=True))
def test_tables_have_eos_at_ends_alone_and_no_unknown_ids(
    automaton: tuple[Transitions, set[int]], eos: list[int]
) -> None:
    transitions, final = automaton
    if not ends_from(transitions, final, 0):
        return
    guide, vocab = Guide.of_transitions("x", 0, transitions, final, VOCAB), VOCAB + 4
    classes, moves = guide.tables(tuple(eos), vocab)
    assert classes.shape == (vocab,) and moves.numel() == guide.table_size
    for state in range(guide.states):
        complete = bool(guide.final[state]) and bool((guide.moves[state] < 0).all())
        assert moves[state, -1] == (COMPLETE if complete else DEAD)
        for token in range(vocab):
            to = int(moves[state, int(classes[token])])
            if token in eos:
                assert to == (state if guide.final[state] else DEAD)
            elif token >= VOCAB:
                assert to in (DEAD, COMPLETE)
            else:
                assert to == guide.moves[state, int(guide.classes[token])]


def test_an_eos_token_that_is_an_ordinary_one_is_no_text() -> None:
    """0 -a-> 1 -b-> 2, 0 -b-> 2: with b an EOS token nothing matches; with a, only the second way is left."""
    guide = Guide.of_transitions("ab|b", 0, {0: {3: 1, 4: 2}, 1: {4: 2}}, {2}, VOCAB)
    classes, moves = guide.tables((3,), VOCAB)
    to = moves[0, classes.long()].tolist()
    assert to[3] == DEAD and to[4] != DEAD
    with raises(InvalidGuide, what=re.compile(r"ab\|b"), reason=re.compile(r"it needs the EOS tokens \[4\] as text")):
        guide.tables((4,), VOCAB)
    # 0 -a-> 1 -b-> 2 and 0 -c-> 2: without b, a leads nowhere.
    guide = Guide.of_transitions("ab|c", 0, {0: {3: 1, 5: 2}, 1: {4: 2}}, {2}, VOCAB)
    classes, moves = guide.tables((4,), VOCAB)
    assert moves[0, classes.long()].tolist().count(DEAD) == VOCAB - 1
    # A token of the same class remains.
    guide = Guide.of_transitions("a|b", 0, {0: {3: 1, 4: 1}}, {1}, VOCAB)
    classes, moves = guide.tables((4,), VOCAB)
    assert (moves[:, classes.long()] >= 0).nonzero().tolist() == [[0, 3], [1, 4]]


def test_hashes_that_collide_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("speccompile.guides.guide._FACTOR", np.uint64(0))
    guide = Guide.of_transitions("x", 0, {0: {0: 1, 1: 2, 2: 1}, 1: {3: 2}}, {2}, VOCAB)
    assert guide.matches([0, 3]) and guide.matches([2, 3]) and guide.matches([1]) and not guide.matches([0])
    assert len(guide.moves.T.unique(dim=0)) == guide.moves.shape[1]


def test_too_many_states() -> None:
    line: dict[int, Any] = {state: {0: state + 1} for state in range(40000)}
    with raises(InvalidGuide, reason=re.compile("its automaton has 40001 states; simplify it")):
        Guide.of_transitions("x", 0, line, {40000}, 1)


def test_the_state_is_int16_and_so_are_all_tables() -> None:
    guide = Guide.of_transitions("x", 7, {7: {0: 7}}, {7}, 3)
    assert guide.moves.dtype == guide.classes.dtype == torch.int16
    assert guide.tables((1,), 5)[0].tolist() == [int(guide.classes[0]), 2, int(guide.classes[2]), 3, 3]

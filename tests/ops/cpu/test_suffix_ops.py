"""The ops of suffix decoding: the C++ form and the Python one, over the same tables, and a search through all texts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile import wrap
from speccompile.ops import suffix
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.suffix_trie import FIELDS, SEPARATOR, Speculation, expected
from support.suffix_search import search
from support.tiny import greedy, random_prompt, tiny_llama

ops = torch.ops.speccompile
FORMS: dict[str, dict[str, Callable[..., Any]]] = {
    "definition": {"draft": suffix.own, "given": suffix.given, "earlier": suffix.earlier},
    "C++": {"draft": ops.suffix_draft_, "given": ops.suffix_given_, "earlier": ops.suffix_earlier_},
}

speculations = st.builds(
    Speculation,
    depth=st.integers(2, 9),
    factor=st.sampled_from([0.5, 1.0, 3.0]),
    offset=st.sampled_from([-1.0, 0.0, 2.0]),
    least=st.sampled_from([0.0, 0.1, 0.5]),
)
texts = st.lists(st.integers(0, 3), min_size=1, max_size=50)
# Where a text is cut: what is between two cuts comes at once.
cuts = st.lists(st.integers(1, 5), min_size=1, max_size=4)


@pytest.fixture(scope="module", autouse=True)
def loaded() -> None:
    assert load_cpu_ops() is None


def zeros(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=torch.int32) for shape in shapes]


def tables_of_two(tables: list[torch.Tensor]) -> dict[str, list[torch.Tensor]]:
    return {form: [table.clone() for table in tables] for form in FORMS}


def lengths(cuts: list[int], whole: int) -> list[int]:
    """Cut again and again in the same way, up to the whole."""
    ends, at = [], 0
    while at < whole:
        at = min(whole, at + cuts[len(ends) % len(cuts)])
        ends.append(at)
    return ends


def call(
    op: str,
    tables: dict[str, list[torch.Tensor]],
    front: tuple[Any, ...],
    rows: list[tuple[int, list[int]]],
    longest: int,
    how: Speculation,
) -> list[tuple[list[int], list[float]]]:
    """What each row (a slot and its text) is proposed, which both forms have to agree on, tables included."""
    slots = torch.tensor([slot for slot, _ in rows])
    length = torch.tensor([len(text) for _, text in rows])
    tokens = torch.zeros((len(rows), 64), dtype=torch.int64)
    for row, (_, text) in enumerate(rows):
        tokens[row, : len(text)] = torch.tensor(text)
    places, got = torch.arange(len(rows)), {}
    for form in FORMS:
        arguments = (*tables[form], *front, slots, places, tokens, length, longest, how.factor, how.offset, how.least)
        got[form] = FORMS[form][op](*arguments)
    for one, other in zip(*got.values(), strict=True):
        assert torch.equal(one, other)
    for one, other in zip(*tables.values(), strict=True):
        assert torch.equal(one, other)
    drafts, lens, scores = got["C++"]
    return [(drafts[row, :count].tolist(), scores[row, :count].tolist()) for row, count in enumerate(lens.tolist())]


def same(got: tuple[list[int], list[float]], wanted: tuple[list[int], list[float]]) -> None:
    assert got[0] == wanted[0] and got[1] == pytest.approx(wanted[1])


@settings(deadline=None)
@given(text=texts, other=texts, cuts=cuts, longest=st.integers(1, 7), how=speculations)
def test_a_text_of_its_own(text: list[int], other: list[int], cuts: list[int], longest: int, how: Speculation) -> None:
    """At once or in pieces; two slots beside each other."""
    nodes = 64 * how.depth + 1
    tables = tables_of_two(zeros((3, 2), (3, how.depth + 1), (3, FIELDS, nodes), (3, 2 * nodes)))
    for end in lengths(cuts, max(len(text), len(other))):
        rows = [(1, text[:end]), (0, other[:end])]
        for (_, known), got in zip(rows, call("draft", tables, (), rows, longest, how), strict=True):
            same(got, search([known], known, longest, how))
    # A slot whose text is shorter than what was read has another text.
    same(call("draft", tables, (), [(1, other[:1])], longest, how)[0], search([other[:1]], other[:1], longest, how))


@settings(deadline=None)
@given(
    corpus=st.lists(texts, min_size=1, max_size=4), text=texts, cuts=cuts, longest=st.integers(1, 7), how=speculations
)
def test_given_texts(corpus: list[list[int]], text: list[int], cuts: list[int], longest: int, how: Speculation) -> None:
    whole = torch.tensor([token for ids in corpus for token in (*ids, SEPARATOR)], dtype=torch.int32)
    nodes = len(whole) * how.depth + 1
    tables = tables_of_two([whole, *zeros((2,), (FIELDS, nodes), (2 * nodes,), (2, how.depth + 2))])
    for end in lengths(cuts, len(text)):
        (got,) = call("given", tables, (), [(0, text[:end])], longest, how)
        same(got, search(corpus, text[:end], longest, how))


class Halves:
    """What the two tries of earlier texts have learned, as texts."""

    def __init__(self, room: int, slots: int) -> None:
        self.room = room
        self.learned: list[list[list[int]]] = [[], []]
        # Of each half, where each slot writes, and what it has read since that half began.
        self.pieces: list[dict[int, list[int]]] = [{}, {}]
        self.known: list[dict[int, list[int]]] = [{slot: [] for slot in range(slots)} for _ in (0, 1)]
        self.young = 0

    def read(self, slot: int, tokens: list[int]) -> None:
        for token in tokens:
            if sum(map(len, self.learned[self.young])) >= self.room:
                self.young = 1 - self.young
                self.learned[self.young], self.pieces[self.young] = [], {}
                self.known[self.young] = {slot: [] for slot in self.known[self.young]}
            pieces = self.pieces[self.young]
            if slot not in pieces:
                pieces[slot] = []
                self.learned[self.young].append(pieces[slot])
            pieces[slot].append(token)
            for side in (0, 1):
                self.known[side][slot].append(token)

    def leave(self, slot: int) -> None:
        for side in (0, 1):
            self.pieces[side].pop(slot, None)
            self.known[side][slot] = []

    def propose(self, slot: int, longest: int, how: Speculation) -> tuple[list[int], list[float]]:
        newer, older = (
            search(self.learned[side], self.known[side][slot], longest, how) for side in (self.young, 1 - self.young)
        )
        return older if expected(older[1]) > expected(newer[1]) else newer


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(st.integers(0, 1), texts), min_size=1, max_size=6),
    room=st.integers(9, 60),
    cuts=cuts,
    longest=st.integers(1, 7),
    how=speculations,
)
def test_earlier_texts(
    requests: list[tuple[int, list[int]]], room: int, cuts: list[int], longest: int, how: Speculation
) -> None:
    """Requests one after another, in either slot; the third is the dummy, from whom nothing is learned."""
    nodes = room * how.depth + 1
    tables = tables_of_two(zeros((3, 2), (2, FIELDS, nodes), (2, 2 * nodes), (3, 1 + 2 * (how.depth + 1))))
    halves = Halves(room, 2)
    for slot, text in requests:
        for begun, end in zip([0, *lengths(cuts, len(text))], lengths(cuts, len(text)), strict=False):
            halves.read(slot, text[begun:end])
            got, dummy = call("earlier", tables, (room,), [(slot, text[:end]), (2, text[:end])], longest, how)
            same(got, halves.propose(slot, longest, how))
            assert dummy == ([], [])
        assert int(tables["C++"][0][:2, 0].max()) <= room
        halves.leave(slot)
        for form in FORMS:
            tables[form][3][slot] = 0


@settings(deadline=None, max_examples=30)
@given(moves=st.lists(st.tuples(st.integers(0, 2), texts), max_size=12), room=st.integers(9, 40), how=speculations)
def test_texts_side_by_side_agree(moves: list[tuple[int, list[int]]], room: int, how: Speculation) -> None:
    """Three slots whose texts grow in turns, each of them new now and then: both forms do the same."""
    nodes = room * how.depth + 1
    tables = tables_of_two(zeros((3, 2), (2, FIELDS, nodes), (2, 2 * nodes), (4, 1 + 2 * (how.depth + 1))))
    known: dict[int, list[int]] = {slot: [] for slot in range(3)}
    for slot, more in moves:
        known[slot] = more if len(known[slot]) + len(more) > 60 else known[slot] + more
        call("earlier", tables, (room,), list(known.items()), 7, how)
        assert int(tables["C++"][0][:2, 1].max()) < nodes


def test_steps_with_kernels_of_ours_call_them() -> None:
    model = tiny_llama()
    prompt = random_prompt(9, 2)
    said = greedy(model, prompt, 30)
    options: dict[str, Any] = {"max_depth": 6, "corpus": [prompt + said], "remember": 100}
    with wrap(model, "suffix", tiers=(0, 3), max_len=64, backend="inductor", policy="fixed:3", **options) as spec:
        targets = {str(node.target) for node in spec.tiers[3].graph.graph.nodes if node.op == "call_function"}
        called = {target for target in targets if "suffix" in target}
        assert called == {f"speccompile.suffix_{name}_.default" for name in ("draft", "given", "earlier")}
        assert spec.generate(torch.tensor([prompt]), max_new_tokens=30)[0, 9:].tolist() == said
        assert spec.stats.acceptance_length > 3

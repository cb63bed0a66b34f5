"""The ops that propose trees: by hand, and C++ against Python."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops import ngram, suffix
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.suffix_trie import FIELDS
from speccompile.ops.tree import merged

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
texts = st.integers(2, 4).flatmap(lambda vocab: st.lists(st.integers(0, vocab - 1), min_size=1, max_size=40))
#: Of more tokens than a node lists as children.
wide_texts = st.lists(st.integers(0, 15), min_size=1, max_size=40)


def test_paths_are_merged_by_hand() -> None:
    paths = [([5, 6], [0.9, 0.2]), ([5, 7, 8], [0.5, 0.4, 0.1]), ([6], [0.3])]
    tokens, parents, chances = merged(paths, 4)
    assert tokens == [5, 7, 6, 6] and parents == [0, 1, 0, 1] and chances == [0.9, 0.4, 0.3, 0.2]


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=5), st.integers(1, 12), st.randoms())
def test_the_first_tokens_of_a_merged_tree_are_a_tree(paths: list[list[int]], nodes: int, rng: object) -> None:
    given_paths = [(path, [0.7**depth / (1 + rank) for depth in range(len(path))]) for rank, path in enumerate(paths)]
    tokens, parents, chances = merged(given_paths, nodes)
    assert all(0 <= parent <= index for index, parent in enumerate(parents))
    assert chances == sorted(chances, reverse=True)
    assert len(set(zip(parents, tokens, strict=True))) == len(tokens) <= nodes


def test_an_ngram_tree_by_hand() -> None:
    # 1 2 was followed by 5, and before that by 3 4; a 2 alone by 9.
    text = [1, 2, 3, 4, 0, 2, 9, 1, 2, 5, 1, 2]
    tokens, parents, count = OPS.ngram_tree(torch.tensor([[*text, 7]]), torch.tensor([len(text)]), 2, 1, 5)
    assert int(count) == 5
    assert tokens.tolist() == [[5, 1, 2, 5, 3]] and parents.tolist() == [[0, 1, 2, 3, 0]]


@settings(deadline=None, max_examples=100)
@given(st.lists(texts, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 9))
def test_ngram_trees_in_cpp_are_the_same(rows: list[list[int]], longest: int, nodes: int) -> None:
    width = max(map(len, rows)) + 1
    tokens = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
    arguments = tokens, torch.tensor([len(row) for row in rows]), longest, 1, nodes
    for one, other in zip(ngram.tree(*arguments), OPS.ngram_tree(*arguments), strict=True):
        assert torch.equal(one, other)


@settings(deadline=None, max_examples=60)
@given(st.lists(texts | wide_texts, min_size=1, max_size=3), st.integers(1, 20))
def test_suffix_trees_in_cpp_are_the_same(rows: list[list[int]], nodes: int) -> None:
    depth, count = 6, len(rows)
    most = 40 * depth + 1
    used, active = torch.zeros(count, 2, dtype=torch.int32), torch.zeros(count, depth + 1, dtype=torch.int32)
    tables = torch.zeros(count, FIELDS, most, dtype=torch.int32), torch.zeros(count, 2 * most, dtype=torch.int32)
    slots = torch.arange(count)
    tokens = torch.tensor([[*row, *[0] * (41 - len(row))] for row in rows])
    rest = slots, slots, tokens, torch.tensor([len(row) for row in rows]), 4, 2.0, 1.0, 0.1
    OPS.suffix_draft_(used, active, *tables, *rest)
    arguments = tables[0], slots, active, slots, 0, depth + 1, nodes
    for one, other in zip(suffix.tree(*arguments), OPS.suffix_tree(*arguments), strict=True):
        assert torch.equal(one, other)

"""Trees of several drafters as one: both forms of the op against sets of paths."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.merge_trees import merge_trees

assert load_cpu_ops() is None

Path = tuple[int, ...]
#: The token of each node, its parent's number, and the share of its parent's probability that it has.
nodes_of = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20), st.sampled_from([0.25, 0.5, 1.0])), max_size=6)


def as_tensors(rows: list[list[tuple[int, int, float]]]) -> tuple[list[torch.Tensor], list[dict[Path, float]]]:
    """A drafter's trees of all rows, without equal siblings, and the probability of each path."""
    width = max([1, *map(len, rows)])
    tokens, parents = torch.zeros(len(rows), width, dtype=torch.int64), torch.zeros(len(rows), width, dtype=torch.int64)
    scores, counts = torch.zeros(len(rows), width), torch.zeros(len(rows), dtype=torch.int64)
    chances: list[dict[Path, float]] = []
    for row, drawn in enumerate(rows):
        paths: list[Path] = [()]
        known: dict[Path, float] = {(): 1.0}
        for token, any_number, share in drawn:
            parent = any_number % len(paths)
            path = (*paths[parent], token)
            if path in known:
                continue
            place = len(paths) - 1
            tokens[row, place], parents[row, place] = token, parent
            scores[row, place] = known[path] = known[paths[parent]] * share
            paths.append(path)
        counts[row] = len(paths) - 1
        chances.append({path: chance for path, chance in known.items() if path})
    return [tokens, parents, counts, scores], chances


@settings(deadline=None, max_examples=150)
@given(st.data(), st.integers(1, 3), st.integers(1, 3), st.integers(1, 9))
def test_the_likeliest_paths_of_all(data: st.DataObject, drafters: int, rows: int, nodes: int) -> None:
    trees, known = zip(*(as_tensors([data.draw(nodes_of) for _ in range(rows)]) for _ in range(drafters)), strict=True)
    arguments = *(list(values) for values in zip(*trees, strict=True)), nodes
    found, native = merge_trees(*arguments), torch.ops.speccompile.merge_trees(*arguments)
    for one, other in zip(found, native, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    for row in range(rows):
        best: dict[Path, float] = {}
        for of_drafter in known:
            for path, chance in of_drafter[row].items():
                best[path] = max(chance, best.get(path, 0.0))
        paths: list[Path] = [()]
        for token, parent in zip(found[0][row].tolist(), found[1][row].tolist(), strict=True):
            paths.append((*paths[parent], token))
        taken = paths[1 : int(found[2][row]) + 1]
        assert len(set(taken)) == len(taken) == min(nodes, len(best))
        assert [best[path] for path in taken] == sorted(best.values(), reverse=True)[:nodes]


def test_of_equal_ones_the_first_drafters_come_first() -> None:
    def tree(*tokens: int) -> tuple[torch.Tensor, ...]:
        count = len(tokens)
        zeros = torch.zeros(1, count, dtype=torch.int64)
        return torch.tensor([tokens]), zeros, torch.tensor([count]), torch.full((1, count), 0.5)

    first, second = tree(5, 6), tree(6, 7)
    tokens, parents, count = merge_trees(*([one, other] for one, other in zip(first, second, strict=True)), 4)
    assert tokens.tolist() == [[5, 6, 7, 0]] and not parents.any() and count.tolist() == [3]

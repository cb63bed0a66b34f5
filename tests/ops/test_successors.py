"""The tables of successors: both forms of their ops against a search in Python."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.successors import chances_of, follow, place_of, store

assert load_cpu_ops() is None

OPS = torch.ops.speccompile
VOCAB, WIDTH = 5, 3


@dataclass
class Tables:
    """The three tensors, for ``pairs`` places of pairs."""

    pairs: int
    successors: torch.Tensor = field(init=False)
    logprobs: torch.Tensor = field(init=False)
    keys: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        rows = VOCAB + self.pairs + 1
        self.successors = torch.zeros(rows, WIDTH, dtype=torch.int32)
        self.logprobs = torch.zeros(rows, WIDTH)
        self.keys = torch.zeros(self.pairs + 1, dtype=torch.int64)

    @property
    def all(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.successors, self.logprobs, self.keys

    def clone(self) -> Tables:
        other = Tables(self.pairs)
        for to, value in zip(other.all, self.all, strict=True):
            to.copy_(value)
        return other

    def row(self, first: int, token: int) -> int:
        """The row that drafts after the two tokens follow."""
        if self.pairs and first >= 0:
            place = int(place_of(torch.tensor(first), torch.tensor(token), self.pairs))
            if int(self.keys[place]) == first * VOCAB + token + 1:
                return VOCAB + place
        return token

    def after(self, first: int, token: int) -> list[tuple[int, float]]:
        if token >= VOCAB:
            return []
        row = self.row(first, token)
        pairs = zip(self.successors[row].tolist(), self.logprobs[row].tolist(), strict=True)
        return [(after - 1, logprob) for after, logprob in pairs if after]


def filled(pairs: int, seed: int) -> Tables:
    """Tables as steps leave them, with successors of some tokens and pairs missing."""
    tables, generator = Tables(pairs), torch.Generator().manual_seed(seed)
    for _ in range(12):
        first, token = (torch.randint(low, VOCAB, (1,), generator=generator) for low in (-1, 0))
        best = torch.randperm(VOCAB, generator=generator)[:WIDTH][None, None]
        best[0, 0, -1] = -1
        logs = torch.randn(1, 1, WIDTH, generator=generator).sort(descending=True).values - 1
        tokens = torch.tensor([[max(int(first), 0), int(token)]])
        positions = torch.tensor([[1 if int(first) >= 0 else 0]])
        alive, slots, drafts = torch.tensor([True]), torch.tensor([0]), torch.zeros(1, 0, dtype=torch.int64)
        store(*tables.all, tokens, alive, slots, positions, token[None], drafts, None, best, logs)
    return tables


def searched(
    tables: Tables, sequence: list[int], count: int, branches: int, least: float
) -> list[tuple[int, int, float]]:
    """Drafts, parents and log-probabilities by a heap of candidates."""
    heap: list[tuple[float, int, int, int]] = []
    found: list[tuple[int, int, float]] = []
    nodes = [(sequence[-2] if len(sequence) > 1 else -1, sequence[-1])]
    order = 0

    def expand(node: int, total: float) -> None:
        nonlocal order
        for token, logprob in tables.after(*nodes[node])[:branches]:
            value = float(torch.tensor(total) + torch.tensor(logprob))
            heapq.heappush(heap, (-value, order, token, node))
            order += 1

    expand(0, 0.0)
    while heap and len(found) < count:
        value, _, token, parent = heapq.heappop(heap)
        if -value < least:
            break
        found.append((token, parent, -value))
        nodes.append((nodes[parent][1], token))
        expand(len(nodes) - 1, -value)
    return found


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([0, 1, 7]),
    st.integers(0, 10**6),
    # A wide lm_head can choose ids outside of the vocabulary.
    st.lists(st.lists(st.integers(0, VOCAB + 1), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(1, 6),
    st.integers(1, WIDTH),
    st.sampled_from([-math.inf, -4.0, -1.0]),
)
def test_both_forms_follow_the_likeliest_paths(
    pairs: int, seed: int, sequences: list[list[int]], count: int, branches: int, least: float
) -> None:
    torch.manual_seed(seed)
    tables = filled(pairs, seed)
    tokens = torch.zeros(len(sequences), 6, dtype=torch.int64)
    for row, sequence in enumerate(sequences):
        tokens[row, : len(sequence)] = torch.tensor(sequence)
    length, places = torch.tensor([len(sequence) for sequence in sequences]), torch.arange(len(sequences)).flip(0)
    arguments = *tables.all, tokens, length, places, count, branches, least
    found, native = follow(*arguments), OPS.follow_successors(*arguments)
    for one, other in zip(found, native, strict=True):
        assert one.dtype is other.dtype and torch.equal(one, other)
    drafts, parents, lens, logs = found
    for row, place in enumerate(places.tolist()):
        wanted = searched(tables, sequences[place], count, branches, least)
        assert int(lens[row]) == len(wanted)
        columns = (drafts[row], parents[row], logs[row])
        assert list(zip(*(column[: len(wanted)].tolist() for column in columns), strict=True)) == wanted
        assert not drafts[row, len(wanted) :].any() and (logs[row, len(wanted) :] == -math.inf).all()


@settings(deadline=None, max_examples=100)
@given(st.sampled_from([0, 3, 50]), st.integers(0, 10**6), st.integers(0, 3), st.booleans())
def test_both_forms_store_what_a_loop_stores(pairs: int, seed: int, drafted: int, tree: bool) -> None:
    generator = torch.Generator().manual_seed(seed)

    def numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    rows, slots_in_all, capacity = 2, 3, 8
    tokens, alive = numbers(0, VOCAB + 1, slots_in_all, capacity), numbers(0, 2, slots_in_all).bool()
    slots = torch.randperm(slots_in_all, generator=generator)[:rows]
    # A mixed step has more rows, and a padded one more positions.
    positions = numbers(0, 4, rows + 1, 1) + torch.arange(drafted + 2)
    read = numbers(0, VOCAB + 2, rows + 1, drafted + 2)
    drafts = torch.where(numbers(0, 5, rows, drafted) > 0, read[:rows, 1 : drafted + 1], -1)
    parents = None
    if tree:
        parents = torch.tensor([[-1, *[int(numbers(0, node, 1)) for node in range(1, drafted + 1)]]] * rows)
    best = numbers(-1, VOCAB, rows, drafted + 1, WIDTH)
    logs = torch.randn(rows, drafted + 1, WIDTH, generator=generator)
    step = tokens, alive, slots, positions, read, drafts, parents, best, logs

    wanted = filled(pairs, seed)
    found, native = wanted.clone(), wanted.clone()
    right: dict[tuple[int, int], bool] = {}
    for fills in (True, False):
        for row, slot in enumerate(slots.tolist()):
            for node in range(drafted + 1) if alive[slot] else ():
                at, token = int(positions[row, 0]), int(read[row, node])
                if node:
                    parent = node - 1 if parents is None else int(parents[row, node])
                    first = int(read[row, parent])
                    right[row, node] = right[row, parent] and int(best[row, parent, 0]) == token
                else:
                    first, right[row, node] = int(tokens[slot, at - 1]) if at else -1, True
                skipped = token >= VOCAB or int(best[row, node, 0]) < 0 or (node > 0 and int(drafts[row, node - 1]) < 0)
                if skipped or right[row, node] == fills:
                    continue
                written = [] if fills and int(wanted.successors[token, 0]) else [token]
                if pairs and 0 <= first < VOCAB:
                    place = int(place_of(torch.tensor(first), torch.tensor(token), pairs))
                    if not fills or not int(wanted.keys[place]):
                        wanted.keys[place] = first * VOCAB + token + 1
                        written.append(VOCAB + place)
                for index in written:
                    wanted.successors[index], wanted.logprobs[index] = best[row, node] + 1, logs[row, node]
    store(*found.all, *step)
    OPS.store_successors_(*native.all, *step)
    for one, other, loop in zip(found.all, native.all, wanted.all, strict=True):
        # The last row and the last key collect what is not written.
        assert torch.equal(one[:-1], loop[:-1]) and torch.equal(other[:-1], loop[:-1])


def test_pairs_are_spread_over_their_places() -> None:
    first, second = torch.meshgrid(torch.arange(0, 128000, 401), torch.arange(0, 128000, 397), indexing="ij")
    counts = place_of(first.flatten(), second.flatten(), 65536).bincount(minlength=65536).double()
    # About 1.57 pairs a place; a Poisson distribution has that variance.
    assert counts.var().item() == pytest.approx(counts.mean().item(), rel=0.2)


def test_chances_are_exponentials() -> None:
    logs = torch.cat(
        [-8 * torch.rand(2, 300, generator=torch.Generator().manual_seed(0)), torch.full((2, 1), -math.inf)], 1
    )
    found = OPS.chances_of(logs)
    assert torch.equal(found, chances_of(logs)) and (found[:, -1] == 0).all()
    torch.testing.assert_close(found, logs.exp())

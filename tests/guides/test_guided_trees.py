"""Trees that a ready drafter proposes hold what the guide allows, and nothing else."""

from __future__ import annotations

import random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import speccompile.sampling.automata  # noqa: F401  defines the ops
from support.tree_cases import proposals

VOCAB, STATES, CLASSES, SLOTS = 6, 4, 3, 4


@settings(deadline=None, max_examples=100)
@given(st.lists(proposals, min_size=1, max_size=SLOTS), st.integers(0, 2**16))
def test_what_a_guide_forbids_is_taken_out(rows: list[tuple[int, ...]], seed: int) -> None:
    rng, longest = random.Random(seed), 1 + max(map(len, rows))
    classes = torch.tensor([[rng.randrange(CLASSES) for _ in range(VOCAB)] for _ in range(SLOTS)], dtype=torch.int32)
    moves = torch.tensor(
        [[rng.randrange(-1, STATES) for _ in range(STATES * CLASSES)] for _ in range(SLOTS)], dtype=torch.int16
    )
    tables = [torch.full((SLOTS,), CLASSES), classes, moves]
    # Slots without a guide are in the state -1.
    states = torch.tensor([rng.choice([-1, 0, 1, 2, 3]) for _ in range(SLOTS)])
    slots = rng.sample(range(SLOTS), len(rows))
    tokens = torch.randint(VOCAB, (SLOTS, longest), generator=torch.Generator().manual_seed(seed))
    parents, count = torch.zeros((SLOTS, longest), dtype=torch.int64), torch.zeros(SLOTS, dtype=torch.int64)
    for slot, row in zip(slots, rows, strict=True):
        parents[slot, : len(row)], count[slot] = torch.tensor(row, dtype=torch.int64), len(row)
    proposed = [
        list(zip(tokens[slot, :most].tolist(), parents[slot, :most].tolist(), strict=True))
        for slot, most in enumerate(count.tolist())
    ]
    torch.ops.speccompile.truncate_trees_(tokens, parents, count, torch.tensor(slots), states, tables)
    for slot in range(SLOTS):
        kept = int(count[slot])
        found = list(zip(tokens[slot, :kept].tolist(), parents[slot, :kept].tolist(), strict=True))
        assert found == allowed(proposed[slot], int(states[slot]), classes[slot], moves[slot])


def allowed(
    proposed: list[tuple[int, int]], state: int, classes: torch.Tensor, moves: torch.Tensor
) -> list[tuple[int, int]]:
    """Tokens and parents, written down once more."""
    number, states, found = {0: 0}, {0: state}, []
    for node, (token, parent) in enumerate(proposed, 1):
        if parent not in number:
            continue
        states[node] = -1 if state < 0 else int(moves[states[parent] * CLASSES + int(classes[token])])
        if state < 0 or states[node] >= 0:
            found.append((token, number[parent]))
            number[node] = len(found)
    return found

"""The noise: what it is, and that places, ids, rows, streams and seeds know nothing of each other."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from speccompile.ops import noise

MASK64 = 2**64 - 1
MASK32 = 2**32 - 1


def mix64(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK64
    return x ^ (x >> 31)


def mix32(x: int) -> int:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK32
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK32
    return x ^ (x >> 16)


def defined_bits(seed: int, stream: int, position: int, token: int) -> int:
    """The definition, in whole numbers."""
    golden = 0x9E3779B97F4A7C15
    key = mix64((seed + golden) & MASK64)
    key = mix64((key + (position + 1) * golden) & MASK64)
    key = mix64((key + (stream + 1) * golden) & MASK64)
    x = mix32(((token * 0x9E3779B9) & MASK32) ^ (key & MASK32))
    return mix32((x + (key >> 32)) & MASK32)


def draws(seeds: list[int], positions: list[int], count: int, stream: int = 0) -> torch.Tensor:
    """Uniforms ``[seeds, positions, count]``."""
    places = torch.tensor(positions).expand(len(seeds), -1)
    return noise.uniform(noise.bits(noise.keys(torch.tensor(seeds), stream, places), count))


def test_bits_are_the_defined_ones() -> None:
    seeds, positions = [0, 1, 2**63 - 1, 123456789], [0, 1, 77, 131071]
    places = torch.tensor(positions).expand(len(seeds), -1)
    for stream in (0, 3):
        got = noise.bits(noise.keys(torch.tensor(seeds), stream, places), 200)
        for i, seed in enumerate(seeds):
            for j, position in enumerate(positions):
                expected = [defined_bits(seed, stream, position, token) for token in range(200)]
                assert [value & MASK32 for value in got[i, j].tolist()] == expected


def test_what_a_place_draws_does_not_depend_on_what_else_is_drawn() -> None:
    everything = draws([5, 6, 7], list(range(20)), 1000)
    assert torch.equal(draws([6], [13], 1000)[0, 0], everything[1, 13])
    assert torch.equal(draws([7], [2, 3], 10)[0], everything[2, 2:4, :10])


def test_uniforms_are_never_0_and_never_1() -> None:
    extremes = torch.tensor([0, -1, 1, 2**31 - 1, -(2**31), 2**30], dtype=torch.int32)
    values = noise.uniform(extremes)
    assert (values > 0).all() and (values < 1).all()
    gumbels = -(-torch.log1p(-values)).log()
    assert gumbels.isfinite().all()


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Distance from what is expected in standard deviations (Wilson and Hilferty's normal approximation)."""
    freedom = counts.size - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


AXES = {
    "ids": lambda: draws([1], [9], 2**20).flatten(),
    "positions": lambda: draws([1], list(range(2**20)), 1).flatten(),
    "seeds": lambda: draws(list(range(2**20)), [4], 1).flatten(),
    "far seeds": lambda: draws([i << 40 for i in range(2**20)], [4], 1).flatten(),
}


@pytest.mark.parametrize("axis", AXES)
def test_uniform_along_each_axis(axis: str) -> None:
    values = AXES[axis]().double().numpy()
    counts = np.histogram(values, bins=1024, range=(0, 1))[0]
    assert abs(chi_square(counts, np.full(1024, len(values) / 1024))) < 4.5
    # Neighbours, and those 2, 64 and 1024 apart.
    for lag in (1, 2, 64, 1024):
        correlation = float(np.corrcoef(values[:-lag], values[lag:])[0, 1])
        assert abs(correlation) * math.sqrt(len(values)) < 4.5
        pairs = np.histogram2d(values[:-lag], values[lag:], bins=32, range=[(0, 1), (0, 1)])[0]
        assert abs(chi_square(pairs, np.full((32, 32), (len(values) - lag) / 1024))) < 4.5


@pytest.mark.parametrize("other", ["seed", "stream", "position", "token"])
def test_neighbours_are_independent(other: str) -> None:
    """The joint distribution of what belongs to one seed (stream, position, id) and to the next."""
    places, count = list(range(512)), 2048
    first = draws([3], places, count)
    second = {
        "seed": lambda: draws([4], places, count),
        "stream": lambda: draws([3], places, count, stream=1),
        "position": lambda: draws([3], [place + 1 for place in places], count),
        "token": lambda: draws([3], places, count + 1)[..., 1:],
    }[other]()
    a, b = first.double().flatten().numpy(), second.double().flatten().numpy()
    pairs = np.histogram2d(a, b, bins=64, range=[(0, 1), (0, 1)])[0]
    assert abs(chi_square(pairs, np.full((64, 64), a.size / 4096))) < 4.5
    assert abs(float(np.corrcoef(a, b)[0, 1])) * math.sqrt(a.size) < 4.5


def test_every_bit_changes_with_every_bit() -> None:
    """Avalanche: one bit more in the position or the seed turns over half of the bits."""
    for change in range(16):
        # Far apart, so that none is another one's neighbour.
        positions = torch.arange(4096)[None] << 16
        one = noise.bits(noise.keys(torch.tensor([7]), 0, positions), 4)
        for seed, moved in ((7, positions ^ (1 << change)), (7 ^ (1 << change), positions)):
            two = noise.bits(noise.keys(torch.tensor([seed]), 0, moved), 4)
            turned = torch.stack([((one ^ two) >> bit) & 1 for bit in range(32)]).double().mean((1, 2, 3))
            assert ((turned - 0.5).abs() < 4.5 * 0.5 / math.sqrt(4096 * 4)).all()


def test_gumbels_draw_from_the_distribution() -> None:
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -4.0])
    scores = logits.expand(1, 200_000, 5).clone()
    noise.add_gumbel(scores, torch.tensor([1.0]), torch.tensor([11]), torch.arange(200_000)[None], 0)
    counts = torch.bincount(scores.argmax(-1)[0], minlength=5).double().numpy()
    assert abs(chi_square(counts, (200_000 * logits.double().softmax(-1)).numpy())) < 4


def test_rows_at_temperature_0_get_no_noise() -> None:
    scores = torch.zeros(2, 3, 7)
    noise.add_gumbel(scores, torch.tensor([0.0, 0.5]), torch.tensor([1, 1]), torch.arange(3).expand(2, 3), 0)
    assert not scores[0].any() and scores[1].all()


@pytest.mark.parametrize("start", [None, torch.tensor([3, 9])])
@pytest.mark.parametrize("kept", [1, 40, 400])
def test_few_possible_tokens_get_the_noise_that_they_get_among_all(kept: int, start: torch.Tensor | None) -> None:
    """With 40 of 640 left another way is taken than with 400."""
    seed, positions = torch.tensor([5, 6]), torch.arange(6).view(2, 3)
    temperature, scores = torch.tensor([0.5, 1.0]), torch.randn(2, 3, 640)
    everywhere = scores.clone()
    noise.add_gumbel(everywhere, temperature, seed, positions, noise.TOKENS, start)
    out = scores.argsort(-1)[..., kept:]
    assert (kept * noise.FEW <= 640) == (kept < 400)
    few = scores.scatter(-1, out, float("-inf"))
    noise.add_gumbel(few, temperature, seed, positions, noise.TOKENS, start)
    assert torch.equal(few, everywhere.scatter(-1, out, float("-inf")))

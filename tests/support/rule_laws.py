"""What a rule emits: its law by all drafts and all coins, and a chi-square test of many seeds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator

import torch

from speccompile.acceptance import Rejection
from speccompile.acceptance.block import weigh
from speccompile.ops import noise
from support.rules import RULES

VOCAB = 3
K = 2
Table = dict[tuple[int, ...], torch.Tensor]
Law = dict[tuple[int, ...], float]


def table(seed: int, vocab: int = VOCAB, zeros: bool = False) -> Table:
    """A next-token distribution (float64) after each text of up to K tokens."""
    rng = torch.Generator().manual_seed(seed)
    texts = (text for length in range(K + 1) for text in itertools.product(range(vocab), repeat=length))
    made = {}
    for text in texts:
        logits = 1.5 * torch.randn(vocab, generator=rng, dtype=torch.float64)
        if zeros:
            logits[int(torch.randint(vocab, (), generator=rng))] = float("-inf")
        made[text] = logits.softmax(-1)
    return made


def joint(p: Table) -> dict[tuple[int, ...], float]:
    return {text: math.prod(float(p[text[:i]][text[i]]) for i in range(K + 1)) for text in sequences()}


def sequences() -> Iterator[tuple[int, ...]]:
    return itertools.product(range(VOCAB), repeat=K + 1)


Judged = Callable[..., tuple[torch.Tensor, torch.Tensor]]
Bars = Callable[..., list[float]]


def ratios(probs: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> list[float]:
    """p/q of each draft, at most 1."""
    p = probs[:, :K].gather(-1, drafts[..., None])[0, :, 0]
    q = torch.ones(K) if draft_probs is None else draft_probs.gather(-1, drafts[..., None])[0, :, 0]
    return [min(1.0, float(a / b)) if b else 1.0 for a, b in zip(p, q, strict=True)]


def heights(probs: torch.Tensor, drafts: torch.Tensor, draft_probs: torch.Tensor | None) -> list[float]:
    return [float(height) for height in weigh(probs, drafts, torch.tensor([K]), draft_probs)[0][0]]


def law(
    p: Table, q: Table, *, certain: bool, rule: Judged = Rejection.judge, bars_of: Bars = ratios
) -> dict[tuple[int, ...], float]:
    """Of the first K+1 tokens when the drafts come from ``q``, by all drafts and all outcomes of the coins; what a step
    did not emit is drawn by the target later. ``certain``: the rule does not receive q."""
    result = dict.fromkeys(sequences(), 0.0)
    for drafts in itertools.product(range(VOCAB), repeat=K):
        drawn = math.prod(float(q[drafts[:i]][drafts[i]]) for i in range(K))
        probs = torch.stack([p[drafts[:i]] for i in range(K + 1)])[None]
        draft_probs = None if certain else torch.stack([q[drafts[:i]] for i in range(K)])[None]
        # A coin is compared with one bar and nothing else: one below, and one above, if there is room.
        bars = bars_of(probs, torch.tensor([drafts]), draft_probs)
        sides = [[(bar / 2, bar), ((1 + bar) / 2, 1 - bar)] for bar in bars]
        for outcome in itertools.product(*sides):
            weight = drawn * math.prod(chance for _, chance in outcome)
            if not weight:
                continue
            coins = torch.tensor([[coin for coin, _ in outcome]], dtype=torch.float64)
            accepted, left = rule(probs, torch.tensor([drafts]), torch.tensor([K]), draft_probs, coins)
            a = int(accepted)
            bonus = left[0, a] / left[0, a].sum()
            for text in result:
                if text[:a] == drafts[:a]:
                    later = math.prod(float(p[text[:i]][text[i]]) for i in range(a + 1, K + 1))
                    result[text] += weight * float(bonus[text[a]]) * later
    return result


def distance(one: dict[tuple[int, ...], float], other: dict[tuple[int, ...], float]) -> float:
    return max(abs(one[text] - other[text]) for text in one)


TEXTS = 40_000
LONG = 4


def chi_square(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """In standard deviations (Wilson and Hilferty); cells that expect fewer than 5 are put together."""
    rare = expected < 5
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    freedom = len(counts) - 1
    value = float(((counts - expected) ** 2 / expected).sum())
    return ((value / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))


def play(rule: str, drafter: str, p: torch.Tensor, q: torch.Tensor, stream: int) -> tuple[torch.Tensor, float]:
    """Texts of LONG tokens, one a seed, of a target that looks at its newest token alone (``p``, ``[V, V]``), round by
    round until all are there; and the share of accepted drafts."""
    vocab = len(p)
    seed = torch.arange(TEXTS) * 7919
    text = torch.zeros(TEXTS, LONG + K + 3, dtype=torch.int64)
    length = torch.ones(TEXTS, dtype=torch.int64)
    rows, ones = torch.arange(TEXTS), torch.ones(TEXTS)
    judged = passed = 0
    while int(length.min()) < LONG + 1:
        newest = text[rows, length - 1]
        drafts, probs, read = [], [], [newest]
        for i in range(K):
            logits = q[read[-1]].log()
            positions = (length + i)[:, None]
            if drafter == "draws":
                start = None if stream == noise.TOKENS else length
                drafts.append((logits + noise.gumbel(seed, stream, positions, vocab, start)[:, 0]).argmax(-1))
            else:
                drafts.append((positions[:, 0] * 7 + read[-1] + 1) % vocab)
            probs.append(q[read[-1]])
            read.append(drafts[-1])
        scores = torch.stack([p[token].log() for token in read], dim=1).float()
        drafted = torch.stack(drafts, dim=1)
        draft_probs = torch.stack(probs, dim=1).float() if drafter == "draws" else None
        lens = torch.where(length < LONG + 1, K, 0)
        tokens, accepted = RULES[rule](scores, drafted, lens, length, ones, seed, draft_probs)
        judged, passed = judged + int(lens.sum()), passed + int(accepted.sum())
        for i in range(K + 1):
            emitted = (i <= accepted) & (length < LONG + 1)
            text[rows[emitted], length[emitted]] = tokens[emitted, i]
            length = length + emitted
    return text[:, 1 : LONG + 1], passed / judged


def distance_of(texts: torch.Tensor, p: torch.Tensor) -> float:
    cells = list(itertools.product(range(4), repeat=LONG))
    index = (texts * torch.tensor([64, 16, 4, 1])).sum(-1)
    counts = torch.bincount(index, minlength=len(cells))
    expected = torch.tensor(
        [math.prod(float(p[a, b]) for a, b in itertools.pairwise((0, *cell))) for cell in cells], dtype=torch.float64
    )
    return chi_square(counts, TEXTS * expected)

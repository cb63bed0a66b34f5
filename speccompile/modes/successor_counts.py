"""Tables of successors from given texts, for a drafter that has seen no request yet."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise

import torch

from speccompile.ops.successors import place_of


def write_counts(
    texts: Iterable[Sequence[int]], successors: torch.Tensor, logprobs: torch.Tensor, keys: torch.Tensor
) -> None:
    """Write the most frequent successors of each token and of each pair in ``texts`` to the tables of
    :mod:`speccompile.ops.successors`. A successor that followed c of n times has probability c / (n + 1), the rule of
    succession. Of several pairs with one place the most frequent stays."""
    vocab, places, width = successors.shape[0] - keys.shape[0], keys.shape[0] - 1, successors.shape[1]
    rows: dict[int, Counter[int]] = defaultdict(Counter)
    paired: dict[int, Counter[int]] = defaultdict(Counter)
    for text in texts:
        for token, after in pairwise(text):
            rows[token][after] += 1
        for first, token, after in zip(text, text[1:], text[2:], strict=False):
            paired[first * vocab + token][after] += 1
    if places and paired:
        pairs = torch.tensor(sorted(paired, key=lambda pair: paired[pair].total()))
        found = place_of(pairs // vocab, pairs % vocab, places).tolist()
        # The last one stays.
        pair_at = dict(zip(found, pairs.tolist(), strict=True))
        keys[list(pair_at)] = torch.tensor(list(pair_at.values()), device=keys.device) + 1
        rows.update((vocab + place, paired[pair]) for place, pair in pair_at.items())
    tokens, logs = torch.zeros(len(rows), width, dtype=torch.int32), torch.zeros(len(rows), width)
    for place, counts in enumerate(rows.values()):
        best, seen = counts.most_common(width), counts.total() + 1
        tokens[place, : len(best)] = torch.tensor([token + 1 for token, _ in best])
        logs[place, : len(best)] = torch.tensor([math.log(count / seen) for _, count in best])
    at = list(rows)
    successors[at], logprobs[at] = tokens.to(successors.device), logs.to(logprobs.device)

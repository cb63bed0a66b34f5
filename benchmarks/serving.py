"""Requests that arrive over time: when, with which prompts, and what is reported of how they were served."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import typer
from transformers import PreTrainedTokenizerBase

from benchmarks.prompts import choose_prompts
from speccompile.cli.models import encode
from speccompile.cli.prompts import NamedPrompt
from speccompile.errors import InvalidOption


@dataclass
class Served:
    """One request: seconds since the first arrival at which it arrived, was begun and ended, and its ``tokens``, which
    came at ``moments`` (when, how many)."""

    arrived: float
    begun: float = 0.0
    ended: float = 0.0
    tokens: list[int] = field(default_factory=list)
    moments: list[tuple[float, int]] = field(default_factory=list)

    @property
    def first_token(self) -> float:
        """Seconds it waited for its first token."""
        return self.moments[0][0] - self.arrived

    @property
    def token_gaps(self) -> list[float]:
        """Seconds a token after the first: of tokens that came together, each took its share of the wait."""
        pairs = pairwise(self.moments)
        return [(now - before) / count for (before, _), (now, count) in pairs for _ in range(count)]


@dataclass
class Service:
    """One way to serve all requests. Steps by draft length and by the executable's rows, where there are such."""

    name: str
    slots: int
    requests: list[Served]
    steps_by_tier: dict[int, int] = field(default_factory=dict)
    steps_by_rows: dict[int, int] = field(default_factory=dict)
    acceptance_length: float = 1.0

    @property
    def makespan(self) -> float:
        """From the first arrival to the last end."""
        return max(request.ended for request in self.requests) - min(request.arrived for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        return sum(len(request.tokens) for request in self.requests) / self.makespan

    @property
    def slot_use(self) -> float:
        """Mean share of the slots that have a request."""
        return sum(request.ended - request.begun for request in self.requests) / (self.slots * self.makespan)

    @property
    def first_tokens(self) -> list[float]:
        return [request.first_token for request in self.requests]

    @property
    def token_gaps(self) -> list[float]:
        return [gap for request in self.requests for gap in request.token_gaps]


def percentile(values: Sequence[float], percent: int) -> float:
    """The smallest of ``values`` that no more than so many percent lie below; NaN of none."""
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)] if values else math.nan


def arrivals(rate: float, count: int, seed: int) -> list[float]:
    """Seconds of ``count`` arrivals, ``rate`` a second in the mean, the first at 0."""
    rng, times = random.Random(seed), [0.0]
    while len(times) < count:
        times.append(times[-1] + rng.expovariate(rate))
    return times


def fitting_prompts(
    tokenizer: PreTrainedTokenizerBase, path: Path | None, count: int | None, longest: int
) -> list[tuple[NamedPrompt, list[int]]]:
    """Prompts of ``path`` with at most ``longest`` tokens, and those.

    Raises:
        InvalidOption: there is none.
    """
    chosen = choose_prompts(path, count)
    encoded = [(prompt, encode(tokenizer, prompt.text, prompt.chat)[0].tolist()) for prompt in chosen]
    kept = [(prompt, ids) for prompt, ids in encoded if len(ids) <= longest]
    if not kept:
        raise InvalidOption(where="the command line", name="--max-len", value=longest, reason="no prompt is that short")
    if len(kept) < len(chosen):
        typer.echo(f"left out {len(chosen) - len(kept)} prompts of more than {longest} tokens")
    return kept


def unlike(prompts: Sequence[list[int]], vocab_size: int) -> list[int]:
    """To warm up with: as long as the longest of ``prompts``, and without a beginning that any of them has."""
    rng = random.Random(0)
    first = rng.choice(sorted(set(range(vocab_size)) - {prompt[0] for prompt in prompts}))
    return [first] + [rng.randrange(vocab_size) for _ in range(max(map(len, prompts)) - 1)]


class Watch:
    """A streamer that notes when each token came, and in which step, since those of one step come together."""

    def __init__(self, step: Callable[[], int]) -> None:
        self._step = step
        self._prompt_came = False
        self._steps: Counter[int] = Counter()
        self._times: dict[int, float] = {}

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            step = self._step()
            self._steps[step] += value.numel()
            self._times.setdefault(step, time.perf_counter())
        self._prompt_came = True

    def end(self) -> None:
        """Nothing to flush."""

    def moments(self, start: float) -> list[tuple[float, int]]:
        return [(self._times[step] - start, count) for step, count in self._steps.items()]

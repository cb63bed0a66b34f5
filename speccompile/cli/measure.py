"""Times several ways to decode the same prompts, side by side in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from speccompile.graph.tree import Tree
from speccompile.policies import Chooser, Fixed, Ladder, LearningPolicy
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.check import Difference, first_difference
from speccompile.speculator.speculator import Speculator

TRANSFORMERS = "transformers generate"

#: Smallest logit change for which a different token is not a near-tie of floating point.
NEAR_TIE = 1e-3

_WARM_UP_TOKENS = 8


class TokenTimer:
    """Streamer that records the time of the first token, and the tokens and target passes after it."""

    def __init__(self) -> None:
        self.first_seconds = 0.0
        self.passes = 0
        self.emitted = 0
        self._calls = 0
        self._started = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self._started

    def put(self, value: torch.Tensor) -> None:
        """Count what ``generate`` streams: the prompt, then the tokens of each target pass."""
        # The prompt comes first, then the tokens of each target pass. The pass over the prompt is the first.
        self._calls += 1
        if self._calls == 2:
            self.first_seconds = self.seconds
        elif self._calls > 2:
            self.passes += 1
            self.emitted += value.numel()

    def end(self) -> None:
        """Nothing to flush."""


@dataclass(frozen=True)
class Variant:
    """One way to decode: (ids ``[1, P]``, new tokens, clock) -> ids ``[1, P + new]``."""

    name: str
    generate: Callable[[torch.Tensor, int, TokenTimer], torch.Tensor]


@dataclass(frozen=True)
class Run:
    """Run of one variant over one prompt. ``passes`` and ``emitted`` exclude the pass over the prompt."""

    tokens: list[int]
    first_seconds: float
    seconds: float
    passes: int
    emitted: int


@dataclass(frozen=True)
class Summary:
    """Several runs of one variant."""

    runs: Sequence[Run]

    @property
    def tokens_per_second(self) -> float:
        """New tokens of all runs over their whole time, with prompts."""
        return sum(len(run.tokens) for run in self.runs) / sum(run.seconds for run in self.runs)

    @property
    def decode_tokens_per_second(self) -> float:
        """Speed without the first token and the time to it; 0.0 if there is only one token."""
        seconds = sum(run.seconds - run.first_seconds for run in self.runs if len(run.tokens) > 1)
        return sum(len(run.tokens) - 1 for run in self.runs) / seconds if seconds else 0.0

    @property
    def first_seconds(self) -> float:
        """Mean time to the first token."""
        return sum(run.first_seconds for run in self.runs) / len(self.runs)

    @property
    def acceptance_length(self) -> float:
        """Mean emitted tokens per target pass; 0.0 without a pass after the one over the prompt."""
        passes = sum(run.passes for run in self.runs)
        return sum(run.emitted for run in self.runs) / passes if passes else 0.0


def transformers_variant(model: PreTrainedModel, name: str = TRANSFORMERS, **settings: Any) -> Variant:
    """Variant of the model's own greedy ``generate``, with further ``settings``."""
    pad = model.generation_config.pad_token_id
    # Without a pad token generate warns on every call. A single row never needs it.
    settings = {"pad_token_id": 0 if pad is None else pad, **settings}

    def generate(ids: torch.Tensor, new_tokens: int, clock: TokenTimer) -> torch.Tensor:
        result: torch.Tensor = model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new_tokens,
            do_sample=False,
            num_beams=1,
            streamer=clock,
            **settings,
        )
        return result

    return Variant(name, generate)


class Continued:
    """A policy that continues with its chooser, which keeps what it has learned, each time the policy is set."""

    def __init__(self, policy: LearningPolicy) -> None:
        self._policy = policy
        self._chooser: Chooser | None = None

    def __str__(self) -> str:
        return str(self._policy)

    @property
    def uses_costs(self) -> bool:
        return self._policy.uses_costs

    def check(self, draft_lens: Collection[int]) -> None:
        self._policy.check(draft_lens)

    def start(self, ladder: Ladder) -> Chooser:
        self._chooser = self._chooser or self._policy.start(ladder)
        return self._chooser


def tier_variant(spec: Speculator, draft_len: int, name: str | None = None) -> Variant:
    """Variant of ``spec`` at one tier. A step may still run a smaller tier if a drafter has fewer drafts."""
    return policy_variant(spec, Fixed(draft_len), name or tier_name(draft_len))


def policy_variant(spec: Speculator, policy: AnyPolicy, name: str) -> Variant:
    """Variant of ``spec`` under a policy.

    The variant reads every prompt: KV that another variant has left must not be reused.
    """
    assert not spec.engine.prefix_reuse, "wrap with prefix_reuse=False"

    def generate(ids: torch.Tensor, new_tokens: int, clock: TokenTimer) -> torch.Tensor:
        spec.engine.policy = policy
        result = spec.generate(ids, torch.ones_like(ids), max_new_tokens=new_tokens, streamer=clock)
        # Tokens are streamed one by one. The number of passes comes from the request.
        request = spec.stats.requests[0]
        clock.passes, clock.emitted = request.row_steps, request.emitted_tokens
        return result

    return Variant(name, generate)


def tier_name(draft_len: int) -> str:
    """Name of a tier of speccompile in tables."""
    return f"speccompile {draft_len}" if isinstance(draft_len, Tree) else f"speccompile K={draft_len}"


def measure(
    variants: Sequence[Variant],
    prompts: Sequence[torch.Tensor],
    new_tokens: int,
    after_run: Callable[[], None] = lambda: None,
) -> dict[str, list[Run]]:
    """Run each prompt ``[1, P]`` through all variants before the next prompt, after an untimed warm-up of each.

    Returns:
        The runs of each variant by its name, in the order of the prompts.
    """
    # The warm-up has the longest prompt: buffers that depend on the size of the input are then large enough.
    longest = max(prompts, key=lambda ids: ids.shape[1])
    for variant in variants:
        variant.generate(longest, min(new_tokens, _WARM_UP_TOKENS), TokenTimer())
        after_run()
    runs: dict[str, list[Run]] = {variant.name: [] for variant in variants}
    for number, ids in enumerate(prompts):
        # The first variant finds other caches than the later ones, so the order rotates.
        first = number % len(variants)
        for variant in [*variants[first:], *variants[:first]]:
            runs[variant.name].append(_timed(variant, ids, new_tokens))
            after_run()
    return runs


def _timed(variant: Variant, ids: torch.Tensor, new_tokens: int) -> Run:
    clock = TokenTimer()
    result = variant.generate(ids, new_tokens, clock)
    seconds = clock.seconds
    tokens = result[0, ids.shape[1] :].tolist()
    return Run(tokens, clock.first_seconds, seconds, clock.passes, clock.emitted)


def differences(
    model: PreTrainedModel, prompts: Sequence[torch.Tensor], expected: Sequence[Run], got: Sequence[Run]
) -> list[Difference]:
    """Positions at which the tokens of ``got`` differ from ``expected``, and the logit changes that explain them."""
    found = (
        first_difference(model, index, ids[0].tolist(), expected[index].tokens, got[index].tokens)
        for index, ids in enumerate(prompts)
    )
    return [difference for difference in found if difference is not None]

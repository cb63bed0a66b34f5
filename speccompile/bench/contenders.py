"""Lines of the table that decode: a wrapped model under a policy, and transformers' ``generate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from speccompile import Speculator
from speccompile.bench.answers import Answer, Decoding, steps_of
from speccompile.bench.method_names import TRANSFORMERS
from speccompile.bench.noting import Noting
from speccompile.policies import Fixed
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.stats import GUIDE_SOURCE
from speccompile.utils.devices import traits_of

#: Tokens of a run that warms a line up.
WARM_UP_TOKENS = 8


class Contender(Protocol):
    """A way to decode."""

    name: str

    def warm_up(self, ids: Sequence[int], decoding: Decoding) -> None:
        """Build and run everything that an answer needs. The drafter and the policy learn nothing from it."""

    def answer(self, ids: Sequence[int], decoding: Decoding, seed: int) -> Answer:
        """Answer the prompt ``ids``."""


class Wrapped:
    """A wrapped model under a policy.

    Each answer begins without what a drafter has learned from other requests: a drafter would otherwise repeat the
    answer that another line of the same wrap has just decoded, and a resumed run would differ from a whole one.
    """

    def __init__(self, name: str, spec: Speculator, policy: AnyPolicy) -> None:
        self.name = name
        self._spec = spec
        self._policy = Noting(policy)
        self._memory = {table: spec.arena[table].clone() for table in spec.mode.memory.tables}

    def warm_up(self, ids: Sequence[int], decoding: Decoding) -> None:
        """See :class:`Contender`."""
        engine = self._spec.engine
        short = replace(decoding, max_new_tokens=min(decoding.max_new_tokens, WARM_UP_TOKENS))
        for draft_len in engine.draft_lens:
            engine.policy = Fixed(draft_len)
            self._run(ids, short, 0)
        # A policy that needs costs times the tiers here.
        engine.policy = self._policy
        engine.policies.prepare()

    def answer(self, ids: Sequence[int], decoding: Decoding, seed: int) -> Answer:
        """See :class:`Contender`."""
        self._spec.engine.policy = self._policy
        self._forget()
        self._policy.done.clear()
        result = self._run(ids, decoding, seed)
        timings, stats = result.timings, result.stats
        assert timings.first_token is not None
        names = self._spec.mode.drafter_names
        drafts = {
            "guide" if source == GUIDE_SOURCE else names[source]: counts for source, counts in stats.drafts_by.items()
        }
        steps = steps_of(self._policy.done, stats)
        return Answer(tuple(result.token_ids), timings.first_token, timings.total, result.finish_reason, steps, drafts)

    def _run(self, ids: Sequence[int], decoding: Decoding, seed: int) -> Any:
        return self._spec.engine.submit(list(ids), seed=seed, **decoding.arguments()).result()  # type: ignore[arg-type]

    def _forget(self) -> None:
        for name, table in self._memory.items():
            self._spec.arena[name].copy_(table)
        for name in self._spec.mode.memory.cursors if self._memory else ():
            self._spec.arena[name].zero_()


class _FirstToken(BaseStreamer):
    """Streamer that records when the first new token comes."""

    def __init__(self) -> None:
        self._calls = 0
        self._started = time.perf_counter()
        self.seconds = 0.0

    def put(self, value: Any) -> None:
        # The prompt comes first.
        self._calls += 1
        if self._calls == 2:
            self.seconds = time.perf_counter() - self._started

    def end(self) -> None: ...


class Transformers:
    """The model's own ``generate``."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.name = TRANSFORMERS
        self._model: Any = model
        pad = model.generation_config.pad_token_id
        # Without a pad token generate warns on every call. A single row never needs it.
        self._pad = 0 if pad is None else pad

    def warm_up(self, ids: Sequence[int], decoding: Decoding) -> None:
        """See :class:`Contender`."""
        self.answer(ids, replace(decoding, max_new_tokens=min(decoding.max_new_tokens, WARM_UP_TOKENS)), 0)

    def answer(self, ids: Sequence[int], decoding: Decoding, seed: int) -> Answer:
        """See :class:`Contender`. The times of steps are not known, and each has one token."""
        prompt = torch.tensor([list(ids)], device=self._model.device)
        with torch.random.fork_rng(devices=[] if traits_of(prompt.device).host_memory else [prompt.device]):
            torch.manual_seed(seed)
            started, clock = time.perf_counter(), _FirstToken()
            output = self._model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                num_beams=1,
                streamer=clock,
                pad_token_id=self._pad,
                **decoding.arguments(),
            )
            tokens = output[0, prompt.shape[1] :].tolist()
            seconds = time.perf_counter() - started
        reason = "max_new_tokens" if len(tokens) == decoding.max_new_tokens else "eos"
        return Answer(tuple(tokens), clock.seconds, seconds, reason)

"""The parts of an engine over a real arena, with tiers that a few lines of Python stand in for: nothing is wrapped."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import torch
from transformers import StoppingCriteriaList

from speccompile.graph.arena import Arena
from speccompile.graph.keys import ChunkKind, Kind, PrefillName, TierKey, TierName
from speccompile.graph.state import StateSpec, core_state, resolve_layout
from speccompile.lowering.tier import Executables, Tier
from speccompile.policies import Fixed
from speccompile.policies.base import AnyPolicy
from speccompile.runtime.engine import Engine
from speccompile.runtime.listener import Listener, Streamer
from speccompile.runtime.options import EngineOptions, StepTraits
from speccompile.runtime.outcomes import Outcomes, pack
from speccompile.runtime.params import Params
from speccompile.runtime.request import NoDriver, Request
from speccompile.runtime.score_records import Records
from speccompile.runtime.stats import RequestStats
from speccompile.runtime.target import Target

VOCAB, MAX_LEN = 64, 24
DRAFT_LENS, WIDTHS = (0, 3), (2, 4)


def small_arena(*specs: StateSpec, max_batch: int = 2) -> Arena:
    """With room for 3 drafts, and the state ``specs`` beside that of every mode."""
    longest = DRAFT_LENS[-1]
    layout = resolve_layout(
        [*core_state(VOCAB), *specs],
        max_batch=max_batch,
        max_len=MAX_LEN,
        max_draft_len=longest,
        max_width=longest + 1,
        vocab_size=VOCAB,
    )
    return Arena(layout, torch.device("cpu"))


def request_of(
    arena: Arena, prompt: list[int] | None = None, *, new: int = 4, streamer: Streamer | None = None, **params: Any
) -> Request:
    """One that waits; ``params`` are fields of :class:`Params`."""
    prompt = [1, 2] if prompt is None else prompt
    given = Params(**{"max_new_tokens": new, "eos": ()} | params)
    listener = Listener(torch.tensor([prompt]), new, streamer, StoppingCriteriaList())
    stats = RequestStats(arena.layout.max_draft_len, prompt_tokens=len(prompt))
    return Request(NoDriver(), prompt, given, listener, stats, Records(given.outputs, arena))


def admitted(arena: Arena, *, slot: int = 0, **options: Any) -> Request:
    """One that owns ``slot``, though nothing of it was written there; ``options`` as :func:`request_of` has them."""
    request = request_of(arena, **options)
    request.admit(slot, 0)
    return request


@dataclass
class CountingTier:
    """Stands in for a tier, or for a prompt chunk: the tokens that a row emits count on from its newest one. A step
    accepts all drafts; a chunk emits a token if it reads the end of the prompt.

    Args:
        runs: gets the name of each tier that runs.
        before: called first.
        silent: slots whose rows emit nothing and stay alive.
        proposes: of each step to come, the drafts that it leaves for the next one: the state that it writes, by name.
    """

    arena: Arena
    name: str
    key: TierKey
    draft_len: int
    runs: list[str]
    before: Callable[[], object]
    silent: set[int]
    proposes: list[dict[str, Any]]

    def run(self) -> None:
        self.runs.append(self.name)
        self.before()
        arena = self.arena
        if self.name.startswith("chunk"):
            slot = int(arena["prefill_slot"][0])
            self._emit(slot, int(arena["prefill_start"][0]) + self.key.width >= int(arena["length"][slot]))
            return
        for slot in arena["slots"][: self.key.rows].tolist():
            self._emit(slot, 0 if slot in self.silent else self.draft_len + 1)
        for name, value in (self.proposes.pop(0) if self.proposes else {}).items():
            for slot in arena["slots"][: self.key.rows].tolist():
                arena[name][slot] = torch.as_tensor(value)

    def _emit(self, slot: int, most: int) -> None:
        arena = self.arena
        length, limit = int(arena["length"][slot]), int(arena["limit"][slot])
        count = min(most, limit - length) if arena["alive"][slot] else 0
        for place in range(length, length + count):
            arena["tokens"][slot, place] = arena["tokens"][slot, place - 1] + 1
        arena["emitted"][slot], arena["accepted"][slot] = count, max(0, count - 1)
        arena["proposed"][slot] = self.draft_len
        arena["length"][slot] += count
        arena["alive"][slot] &= length + count < limit


class Parts(Engine):
    """An engine with two slots, tiers with 0 and 3 drafts, and prompt chunks of 2 and 4 tokens.

    Args:
        specs: of the arena, beside the state of every mode.
        budget: prompt tokens between two steps.
        reuse: of prompts' beginnings.
        late: results of a step are read after the next one was launched.

    Attributes:
        runs: names of the tiers that ran.
        before: called first in each run.
        silent: slots whose rows emit nothing and stay alive.
        proposes: as of :class:`CountingTier`.
    """

    def __init__(
        self,
        policy: AnyPolicy | None = None,
        *specs: StateSpec,
        traits: StepTraits | None = None,
        budget: int | None = None,
        reuse: bool = False,
        late: bool = False,
    ) -> None:
        self.runs: list[str] = []
        self.before: Callable[[], object] = lambda: None
        self.silent: set[int] = set()
        self.proposes: list[dict[str, Any]] = []
        self.arena = arena = small_arena(*specs)
        super().__init__(
            cast(Target, SimpleNamespace(state_of_weights=lambda: 0)),
            arena,
            self.executables("greedy"),
            self.executables,
            self.mixed,
            policy or Fixed(0),
            Outcomes.of(arena, lambda: pack(arena)),
            traits=traits or StepTraits(),
            options=EngineOptions(max_waiting=100, prefill_budget=budget, prefix_reuse=reuse),
        )
        self.scheduler.late = late

    def _tier(self, name: str, key: TierKey, draft_len: int = 0) -> Tier:
        calls = (self.runs, lambda: self.before(), self.silent, self.proposes)
        made = CountingTier(self.arena, name, key, draft_len, *calls)
        return cast(Tier, made)

    def executables(self, kind: Kind) -> Executables:
        tiers = {
            (k, rows, kind): self._tier(f"{kind} K={k} B={rows}", TierKey(rows, k + 1, kind), k)
            for k in DRAFT_LENS
            for rows in (1, 2)
        }
        kinds: list[ChunkKind] = ["inner", kind, "prompt_scored"]
        chunks: dict[PrefillName, Tier] = {
            (width, each): self._tier(f"chunk T={width} {each}", TierKey(1, width, each))
            for width in WIDTHS
            for each in kinds
        }
        return Executables(tiers, chunks)

    def mixed(self, kind: Kind) -> Mapping[TierName, Tier]:
        return {
            (k, rows, kind): self._tier(f"mixed K={k} B={rows}", TierKey(rows, k + 1, kind, WIDTHS[-1]), k)
            for k in DRAFT_LENS
            for rows in (1, 2)
        }

    def submit(self, prompt: list[int] | None = None, **options: Any) -> Request:
        """One more that waits; ``options`` as :func:`request_of` has them."""
        request = request_of(self.arena, prompt, **options)
        self.waiting.push([request], self.slots.free)
        return request

    def running(self, prompt: list[int] | None = None, **options: Any) -> Request:
        """One whose prompt has been read."""
        request = self.submit(prompt, **options)
        while request not in self.batch.rows:
            self.prompts.read()
        self.runs.clear()
        return request

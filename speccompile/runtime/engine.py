"""Steps a batch of requests through tiers over one arena."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from speccompile.errors import TooManyRows
from speccompile.lowering.tier import Tier
from speccompile.runtime.arena import Arena
from speccompile.runtime.policy import Policy, check_tier
from speccompile.runtime.stats import RequestStats, Stats


@dataclass
class Request:
    """One sequence: its slot while it runs, and the tokens it has emitted."""

    slot: int
    prompt: list[int]
    max_new_tokens: int
    eos: list[int]
    stats: RequestStats
    new_tokens: list[int] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        return bool(self.stats.finish_reason)


class Engine:
    """Owns the slots; every change of tier is one assignment to :attr:`tier`.

    Args:
        arena: state of all slots.
        tiers: by draft length.
        prefill: prefill executables by chunk width.
        policy: chooses the draft length of each step.
        ready: the drafter's proposals are in the arena when a step ends, so the smallest tier that serves them runs.
    """

    def __init__(
        self,
        arena: Arena,
        tiers: Mapping[int, Tier],
        prefill: Mapping[int, Tier],
        policy: Policy,
        *,
        ready: bool,
    ) -> None:
        self.arena = arena
        self.tiers = dict(sorted(tiers.items()))
        self.prefill_tiers = dict(sorted(prefill.items()))
        self.policy = policy
        self.ready = ready
        self.stats = Stats(arena.layout.max_draft_len)
        self.tier = self.tiers[0]
        self._running: list[Request] = []
        self._free = list(range(arena.layout.max_batch))

    # --- requests ------------------------------------------------------------------------------------

    def admit(self, prompt: Sequence[int], *, max_new_tokens: int, eos: Sequence[int]) -> Request:
        """Give a request a slot, prefill it and emit its first token.

        The prompt has at least one and fewer than ``max_len`` tokens.

        Raises:
            TooManyRows: no slot is free.
        """
        if not self._free:
            raise TooManyRows(rows=len(self._running) + 1, max_batch=self.arena.layout.max_batch)
        arena, layout = self.arena, self.arena.layout
        slot = self._free.pop(0)
        arena.reset_slot(slot)
        arena["tokens"][slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
        arena["length"][slot] = len(prompt)
        arena["limit"][slot] = min(len(prompt) + max_new_tokens, layout.max_len)
        arena["eos"][slot, : len(eos)] = torch.tensor(eos, dtype=torch.int64)
        arena["alive"][slot] = True
        stats = RequestStats(layout.max_draft_len, prompt_tokens=len(prompt))
        request = Request(slot, list(prompt), max_new_tokens, list(eos), stats)
        self._running.append(request)
        self._prefill(request)
        self._bind_rows()
        return request

    def release(self) -> None:
        """Drop whatever still runs; its slots are free again."""
        for request in self._running:
            self.arena["alive"][request.slot] = False
            self._free.append(request.slot)
        self._running.clear()
        self._bind_rows()

    def _prefill(self, request: Request) -> None:
        arena = self.arena
        arena["prefill_slot"][0] = request.slot
        start = 0
        for width in chunk_widths(len(request.prompt), list(self.prefill_tiers)):
            arena["prefill_start"][0] = start
            self.prefill_tiers[width].run()
            self.stats.prefill_passes += 1
            start += width
        self._collect(request, int(arena["emitted"][request.slot]))

    def _bind_rows(self) -> None:
        slots = [request.slot for request in self._running]
        slots += [self.arena.layout.dummy_slot] * (self.arena.layout.max_batch - len(slots))
        self.arena["slots"].copy_(torch.tensor(slots, dtype=torch.int64))

    # --- steps ---------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        return list(self._running)

    def step(self) -> list[Request]:
        """Run one tier on all running requests, if there are any; returns those that took part."""
        if not self._running:
            return []
        took_part = list(self._running)
        self.tier = self.next_tier()
        self.tier.run()
        self.stats.count_step(self.tier.draft_len)
        arena = self.arena
        columns = [arena[name].tolist() for name in ("emitted", "accepted", "proposed")]
        for request in took_part:
            emitted, accepted, proposed = (column[request.slot] for column in columns)
            self.stats.count(emitted, accepted, proposed)
            request.stats.count(emitted, accepted, proposed)
            self._collect(request, emitted)
        if len(self._running) < len(took_part):
            self._bind_rows()
        return took_part

    def next_tier(self) -> Tier:
        """The tier the policy asks for; for a ready drafter, the smallest that serves what was proposed."""
        draft_len = self.policy.choose(len(self._running))
        check_tier(draft_len, self.tiers)
        if self.ready:
            proposed = self._longest_proposal()
            draft_len = min(size for size in self.tiers if size >= min(draft_len, proposed))
        return self.tiers[draft_len]

    def _longest_proposal(self) -> int:
        if "draft_lens" not in self.arena:
            return 0
        lens = self.arena["draft_lens"].tolist()
        return max(lens[request.slot] for request in self._running)

    def _collect(self, request: Request, emitted: int) -> None:
        slot, done = request.slot, len(request.prompt) + len(request.new_tokens)
        new = self.arena["tokens"][slot, done : done + emitted].tolist()
        request.new_tokens.extend(new)
        request.stats.new_tokens += emitted
        if not self.arena["alive"][slot]:
            request.stats.finish_reason = self._finish_reason(request)
            self._running.remove(request)
            self._free.append(slot)

    def _finish_reason(self, request: Request) -> str:
        if request.new_tokens[-1] in request.eos:
            return "eos"
        return "max_new_tokens" if len(request.new_tokens) == request.max_new_tokens else "max_len"


def chunk_widths(length: int, widths: Sequence[int]) -> list[int]:
    """Cut a prompt of ``length`` tokens into chunks of the given (ascending) ``widths``, the last one padded.

    The smallest width that covers the rest is taken when little of it is padding, else the largest that fits.
    """
    chunks = []
    while length > 0:
        covering = [width for width in widths if length <= width <= length * 3 // 2]
        fitting = [width for width in widths if width <= length]
        chunks.append(covering[0] if covering else fitting[-1] if fitting else widths[0])
        length -= chunks[-1]
    return chunks

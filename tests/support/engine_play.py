"""An engine, requests that come, go, share beginnings and change tiers, and what has to hold after every move."""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import LlamaForCausalLM

import speccompile
from speccompile import Speculator
from speccompile.errors import QueueFull
from speccompile.graph.arena import Arena
from speccompile.graph.paging import PAGES, UNUSED
from speccompile.runtime.prefill import PrefillBudget
from speccompile.runtime.request import Request
from speccompile.utils.kv_memory import KVMemory
from support.tiny import tiny_llama

VOCAB = 128
MAX_LEN = 96
MAX_NEW = 20
TIERS = (0, 1, 3)
# (mode, slots, pages), built once. 13 pages of 16 positions are half of what four slots may need.
SPECS = (("ngram", 1, None), ("early_exit", 2, None), ("none", 3, 13), ("ngram", 4, None), ("early_exit", 4, 13))
PAGE = 16
# A drive that has not ended after so many steps never does.
ENDLESS = 3000


@functools.cache
def model() -> LlamaForCausalLM:
    return tiny_llama(vocab=VOCAB)


@functools.cache
def spec_of(mode: str, slots: int, pages: int | None = None, **options: Any) -> Speculator:
    """``mode`` may be several, with + between them."""
    names = mode.split("+") if "+" in mode else mode
    if pages is not None:
        options["kv_memory"] = KVMemory(PAGE * pages, tokens=PAGE * pages, page=PAGE)
    spec = speccompile.wrap(
        model(), names, tiers=TIERS, max_batch=slots, max_len=MAX_LEN, backend="eager", policy="fixed:3", **options
    )
    # What the first watched request makes belongs to the fingerprint.
    spec.engine.prepare("greedy", watched=True)
    return spec


@functools.cache
def reference(prompt: tuple[int, ...]) -> list[int]:
    """transformers' greedy text, as long as any request may want it; empty where two tokens are nearly tied."""
    ids = torch.tensor([prompt])
    room = min(MAX_NEW, MAX_LEN - len(prompt))
    out = model().generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=room,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(out.logits).topk(2).values
    return [] if (best[:, 0] - best[:, 1]).min() < 1e-4 else out.sequences[0, len(prompt) :].tolist()


@functools.cache
def prompts() -> list[tuple[int, ...]]:
    """Beginnings of a few stems, some with their own end; texts that others leave; and long ones."""
    rng = random.Random(0)

    def text(length: int, last: int = VOCAB - 1) -> tuple[int, ...]:
        return tuple(rng.randint(0, last) for _ in range(length))

    stems = [text(40), text(40), text(40, last=3), text(12) * 3]
    made = [stem[:cut] for stem in stems for cut in (1, 7, 8, 21, 34)]
    made += [made[rng.randrange(20)] + text(rng.randint(1, 12)) for _ in range(12)]
    for _ in range(14):
        begun = made[rng.randrange(len(made))]
        said = reference(begun)[: rng.randint(1, MAX_NEW)]
        made.append((begun + tuple(said) + text(rng.choice((0, 0, 1, 5))))[: MAX_LEN - 1])
    made += [(stems[0] + text(60))[:length] for length in (MAX_LEN - 9, MAX_LEN - 1)]
    return [prompt for prompt in dict.fromkeys(made) if reference(prompt)]


def expected(prompt: Sequence[int], max_new_tokens: int, eos: Sequence[int]) -> tuple[list[int], str]:
    """Text and finish reason of a request that is not cancelled."""
    text = reference(tuple(prompt))[:max_new_tokens]
    ends = [place for place, token in enumerate(text) if token in eos]
    if ends:
        return text[: ends[0] + 1], "eos"
    return text, "max_new_tokens" if len(text) == max_new_tokens else "max_len"


@dataclass
class Ear:
    """A streamer. At the moment of admission its request's slot holds the prompt and nothing else."""

    arena: Arena
    request: Request | None = None
    cancel_at: int | None = None
    heard: list[int] = field(default_factory=list)
    starts: int = 0
    ends: int = 0
    problem: str = ""

    def put(self, value: torch.Tensor) -> None:
        assert self.request is not None
        prompt = self.request.prompt
        if not self.starts:
            row = self.arena["tokens"][self.request.slot]
            if row[: len(prompt)].tolist() != prompt or row[len(prompt) :].any():
                self.problem = f"slot {self.request.slot} shows {row.tolist()} where {prompt} was admitted"
            self.starts += 1
            return
        self.heard += value.tolist()
        if len(self.heard) == self.cancel_at:
            self.request.cancel()

    def end(self) -> None:
        self.ends += 1


@dataclass
class Known:
    """A request, what it has to become, and, once it was cancelled, what it had by then."""

    request: Request
    text: list[int]
    reason: str
    number: int
    ear: Ear | None = None
    cancelled_with: list[int] | None = None


class Play:
    """An engine, every request that it was given, and what must be true of both at any time."""

    def __init__(
        self, spec: Speculator, *, late: bool = False, max_waiting: int = 1024, prefill_budget: int | None = None
    ) -> None:
        self.spec, self.engine, self.arena = spec, spec.engine, spec.arena
        engine = self.engine
        # What an earlier play left, if it failed, is none of this one's business.
        for request in [*engine.running, *engine.waiting.drain()]:
            request.cancel()
        engine.scheduler.flights.clear()
        # Nor what it read: hypothesis wants every example to begin alike.
        for text in engine.slots._free.values():
            text.clear()
        engine.scheduler.late = late
        engine.waiting.limit = max_waiting
        engine.prompts.budget = PrefillBudget(
            sorted({width for width, _ in engine.prefill_tiers}), prefill_budget, fixed=False
        )
        spec.set_tier(TIERS[-1])
        self.fingerprint = self.arena.fingerprint()
        self.tensors = dict(self.arena)
        self.known: list[Known] = []
        # The most pages that several slots have held at once.
        self.most_shared = 0

    @property
    def slots(self) -> int:
        return self.arena.layout.max_batch

    @property
    def unfinished(self) -> list[Known]:
        return [known for known in self.known if not known.request.finished]

    # --- moves ---------------------------------------------------------------------------------------

    def submit(
        self,
        prompt: tuple[int, ...],
        max_new_tokens: int,
        eos: Sequence[int] = (),
        priority: int = 0,
        listen: bool = False,
        cancel_at: int | None = None,
        num_draft_tokens: int | None = None,
    ) -> bool:
        """False if there was no room."""
        room = self.engine.capacity().free_waiting
        ear = Ear(self.arena, cancel_at=cancel_at) if listen else None
        try:
            request = self.engine.submit(
                list(prompt),
                max_new_tokens=max_new_tokens,
                eos_token_id=list(eos),
                priority=priority,
                streamer=ear,
                num_draft_tokens=num_draft_tokens,
            )
        except QueueFull:
            assert room == 0
            return False
        assert room > 0
        if ear:
            ear.request = request
        self.known.append(Known(request, *expected(prompt, max_new_tokens, eos), len(self.known), ear))
        return True

    def step(self) -> None:
        waiting = [known for known in self.unfinished if known.request.slot < 0]
        self.engine.step()
        left = [known for known in waiting if known.request.slot < 0]
        admitted = [known for known in waiting if known.request.slot >= 0]
        if admitted and left:
            least = min(known.request.params.priority for known in admitted)
            assert least >= max(known.request.params.priority for known in left)

    def cancel(self, known: Known) -> None:
        finished = known.request.finished
        assert known.request.cancel() == (not finished)
        if not finished:
            known.cancelled_with = list(known.request.new_tokens)

    def finish(self, known: Known, by_stream: bool) -> None:
        if by_stream:
            assert list(known.request) == known.request.new_tokens
        else:
            result = known.request.result()
            assert (result.token_ids, result.finish_reason) == (known.request.new_tokens, known.request.finish_reason)
        assert known.request.finished

    def generate(self, chosen: Sequence[tuple[int, ...]], max_new_tokens: int) -> None:
        longest = max(map(len, chosen))
        ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in chosen])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in chosen])
        room = self.engine.capacity().free_waiting
        try:
            got = self.spec.generate(ids, mask, max_new_tokens=max_new_tokens)
        except QueueFull:
            assert room < len(chosen)
            return
        assert room >= len(chosen)
        for row, prompt in zip(got[:, longest:].tolist(), chosen, strict=True):
            text = expected(prompt, max_new_tokens, ())[0]
            assert row == text + [0] * (len(row) - len(text))

    def drain(self) -> None:
        """Step until nothing is left; then nothing may be left anywhere."""
        for _ in range(ENDLESS):
            if self.engine.idle:
                break
            self.step()
            self.check()
        assert self.engine.idle and not self.unfinished
        assert self.engine.slots.free == self.slots and not self.engine.running
        assert not self.arena["alive"].any()
        assert not self.arena["tokens"].any()
        self.check()

    # --- what has to hold ----------------------------------------------------------------------------

    def check(self) -> None:
        for known in self.known:
            self._check_text(known)
        self._check_slots()
        self._check_pages()
        engine, capacity = self.engine, self.engine.capacity()
        waiting = sum(known.request.slot < 0 for known in self.unfinished)
        free = self.slots - len(engine.running)
        assert (capacity.slots, capacity.free_slots, capacity.waiting) == (self.slots, free, waiting)
        assert capacity.free_waiting == engine.waiting.limit + free - waiting >= 0
        assert engine.idle == (not self.unfinished and not engine.scheduler.flights)
        assert self.arena.fingerprint() == self.fingerprint
        assert all(self.arena[name] is tensor for name, tensor in self.tensors.items())

    def _check_text(self, known: Known) -> None:
        request, ear = known.request, known.ear
        new = request.new_tokens
        assert new == known.text[: len(new)], f"{request} of {request.prompt}: {new}, expected {known.text}"
        assert request.error is None, f"{request}: {request.error!r}"
        if known.cancelled_with is not None:
            assert (new, request.finish_reason) == (known.cancelled_with, "cancelled")
        elif ear and ear.cancel_at is not None and len(new) == ear.cancel_at:
            assert request.finish_reason == "cancelled"
        elif request.finished:
            assert (new, request.finish_reason) == (known.text, known.reason)
        assert request.stats.new_tokens == len(new)
        if ear:
            assert not ear.problem, ear.problem
            assert ear.heard == new
            assert ear.starts == request.admitted
            assert ear.ends == request.finished, f"{request}: its streamer was ended {ear.ends} times"
        if new:
            stats = request.stats
            if request in self.engine.batch.rows:
                # Of a reused prompt the first decode step may read the last token.
                assert request.cached >= stats.prompt_tokens - 1 + len(new) - 1
            assert stats.prompt_tokens - 1 <= stats.prefill_tokens + stats.reused_tokens <= stats.prompt_tokens

    def _check_slots(self) -> None:
        running = self.engine.running
        owned = {request.slot for request in running}
        assert len(owned) == len(running) and owned <= set(range(self.slots))
        assert self.engine.slots.free + len(owned) == self.slots
        ours = {id(known.request): known for known in self.unfinished if known.request.slot >= 0}
        assert set(ours) == {id(request) for request in running}
        for request in running:
            self._check_owned(request, ours[id(request)].text)
        for slot in set(range(self.slots)) - owned:
            for name, tensor in self.arena.layout.tensors.items():
                assert not tensor.reset or bool((self.arena[name][slot] == tensor.fill).all()), (name, slot)

    def _check_pages(self) -> None:
        """Each page is free or has holders, and no slot writes to a page of another one."""
        pool, paging = self.engine.slots.pool, self.arena.layout.paging
        if pool is None or paging is None:
            return
        table = self.arena[PAGES].tolist()
        held = {slot: [page for page in row if page != UNUSED] for slot, row in enumerate(table)}
        assert {slot: pool.held_by([slot]) for slot in held} == {slot: set(pages) for slot, pages in held.items()}
        assert all(row[: len(held[slot])] == held[slot] for slot, row in enumerate(table))
        holders = Counter(page for pages in held.values() for page in pages)
        assert pool.free + len(holders) == pool.size == paging.count - 1
        assert pool.shared == sum(count > 1 for count in holders.values())
        self.most_shared = max(self.most_shared, pool.shared)
        for request in self.engine.running:
            written = held[request.slot][request.cached // paging.size :]
            assert all(holders[page] == 1 for page in written)
            # What the step before has written; the next one gets more pages before it runs.
            assert len(held[request.slot]) >= paging.pages_of(request.cached)

    def _check_owned(self, request: Request, text: list[int]) -> None:
        """Its slot holds prompt and new tokens, and 0 after them. With late results it may be a step ahead."""
        arena, slot = self.arena, request.slot
        row, length = arena["tokens"][slot].tolist(), int(arena["length"][slot])
        known = len(request.prompt) + len(request.new_tokens)
        late = self.engine.scheduler.late
        assert length >= known if late else length == known
        if "draft_lens" in arena and not late and request in self.engine.batch.rows:
            assert request.proposal.length == int(arena["draft_lens"][slot])
        assert row[:length] == (request.prompt + text)[:length]
        assert not any(row[length:])
        assert int(arena["prompt_length"][slot]) == len(request.prompt)
        assert int(arena["limit"][slot]) == min(len(request.prompt) + request.params.max_new_tokens, MAX_LEN)
        eos = list(request.params.eos)
        assert arena["eos"][slot].tolist() == eos + [-1] * (arena["eos"].shape[1] - len(eos))

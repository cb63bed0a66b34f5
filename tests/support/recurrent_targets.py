"""Targets with recurrent state, wrapped once, and what their state and text are without drafts."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

import speccompile
from speccompile import Speculator
from speccompile.graph.layer_state import ABSORBED
from speccompile.runtime.request import Request
from support.dice import Dice
from support.families import model_of
from support.our_kernels import our_kernels
from support.tiny import greedy

TIERS = (0, 1, 3)
SLOTS, NEW = 3, 16
#: Tokens between two checkpoints of state.
INTERVAL = 12
#: A convolution alone; the delta rule; Mamba-2, and Mamba, which has no attention at all. As torch computes the last
#: numbers of a tensor in another way than whole vectors, there are whole vectors of all that depends on the width.
FAMILIES: dict[str, dict[str, int]] = {
    "lfm2": {},
    "qwen3_next": {"linear_num_value_heads": 32},
    "bamba": {"mamba_n_heads": 32, "mamba_d_head": 2, "mamba_d_state": 16},
    "mamba": {},
}


class Drafter:
    """Drafts some right tokens of the texts that it knows, and then others."""

    def __init__(self, seed: int = 0) -> None:
        self.random = random.Random(seed)
        self.texts: list[list[int]] = []
        self.wrong: Sequence[int] = range(5, 100)
        self.mistakes = 0

    def __call__(self, tokens: list[int], draft_len: int) -> list[int]:
        text = next((text for text in self.texts if text[: len(tokens)] == tokens), tokens)
        right = text[len(tokens) : len(tokens) + self.random.randint(0, draft_len)]
        self.mistakes += draft_len - len(right)
        return [*right, *self.random.choices(self.wrong, k=draft_len - len(right))]


@dataclass
class Wrapped:
    """A family's tiny model, whose drafter knows what comes next."""

    model: PreTrainedModel
    drafter: Drafter
    spec: Speculator
    texts: dict[tuple[int, ...], list[int]] = field(default_factory=dict)
    #: By prompt, the state after each step without drafts, by how many tokens it has absorbed.
    plain: dict[tuple[int, ...], dict[int, list[torch.Tensor]]] = field(default_factory=dict)

    def expected(self, prompt: list[int]) -> list[int]:
        """transformers' own text, which the drafter knows from now on."""
        key = tuple(prompt)
        if key not in self.texts:
            self.texts[key] = greedy(self.model, prompt, NEW)
            self.drafter.texts.append([*prompt, *self.texts[key]])
        return self.texts[key]

    def decode_plainly(self, texts: list[list[int]]) -> None:
        """Fill ``plain`` for prompts that are not in it yet, and check their texts."""
        new = [prompt for prompt in texts if tuple(prompt) not in self.plain]

        def note(request: Request) -> None:
            absorbed, state = self.state_of(request)
            self.plain.setdefault(tuple(request.prompt), {})[absorbed] = state

        self.spec.set_tier(0)
        with self.nothing_reused():
            for first in range(0, len(new), SLOTS):
                for request in stepped(self, new[first : first + SLOTS], note):
                    assert request.new_tokens == self.expected(request.prompt)
        # Of a prompt that is known but for its last token the first step reads that one.
        for prompt in new:
            if len(prompt) > 1 and self.spec.engine.prefix_reuse:
                self.plain[tuple(prompt)][len(prompt) - 1] = self.fresh_state(prompt[:-1])

    @contextlib.contextmanager
    def nothing_reused(self) -> Iterator[None]:
        slots = self.spec.engine.slots
        before, slots._reuse = slots._reuse, False
        yield
        slots._reuse = before

    def fresh_state(self, text: list[int]) -> list[torch.Tensor]:
        """The state after ``text`` was read as a prompt."""
        with self.nothing_reused():
            request = self.spec.engine.submit(text, max_new_tokens=NEW)
            while not (request.new_tokens or request.finished):
                self.spec.engine.step()
        absorbed, state = self.state_of(request)
        assert absorbed == len(text)
        request.cancel()
        return state

    def state_of(self, request: Request) -> tuple[int, list[torch.Tensor]]:
        """How many tokens the state of a request's slot has absorbed, and what it is."""
        arena, slot = self.spec.engine.arena, request.slot
        absorbed, found = int(arena[ABSORBED][slot]), []
        for name in arena.layout.recurrent:
            if name.startswith(("delta_", "scan_")) and not name.endswith("_kept"):
                found.append(arena[name][slot].clone())
            elif name.startswith("conv_"):
                places = arena[name].shape[1]
                window = places - self.spec.engine.arena.layout.max_width
                settled = [p % places for p in range(max(0, absorbed - window), absorbed)]
                found.append(arena[name][slot, settled].clone())
        return absorbed, found


@functools.cache
def wrapped(name: str) -> Wrapped:
    model, drafter = model_of(name, **FAMILIES[name]), Drafter()
    with our_kernels() as backend:
        spec = speccompile.wrap(
            model,
            "user_provided",
            draft=drafter,
            host=True,
            tiers=TIERS,
            max_batch=SLOTS,
            max_len=60,
            backend=backend,
            deterministic=True,
            policy=Dice(TIERS),
            state_checkpoints=INTERVAL,
        )
    return Wrapped(model, drafter, spec)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    choose = random.Random(seed)
    return [choose.choices(range(5, 100), k=choose.choice([1, 2, 5, 11, 30])) for _ in range(count)]


def stepped(target: Wrapped, texts: list[list[int]], see: Callable[[Request], None]) -> list[Request]:
    """All of ``texts`` at once, each request looked at after every step."""
    engine = target.spec.engine
    requests = [engine.submit(prompt, max_new_tokens=NEW) for prompt in texts]
    while any(not request.finished for request in requests):
        engine.step()
        for request in requests:
            if not request.finished and request.slot is not None and request.new_tokens:
                see(request)
    return requests


def finished(target: Wrapped, prompt: list[int], new: int = 6) -> Request:
    request = target.spec.engine.submit(prompt, max_new_tokens=new)
    target.spec.engine.run()
    assert request.new_tokens == target.expected(prompt)[:new]
    return request


def cancelled_halfway(target: Wrapped, prompt: list[int]) -> int:
    """How many tokens of the prompt were read."""
    engine = target.spec.engine
    request = engine.submit(prompt, max_new_tokens=NEW)
    while request.slot < 0 or not engine.arena[ABSORBED][request.slot]:
        engine.step()
    read = int(engine.arena[ABSORBED][request.slot])
    assert 0 < read < len(prompt) and not request.new_tokens
    request.cancel()
    return read

"""Slots with recurrent state, without a model: what a checkpoint is said to hold is what is there."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.graph.arena import Arena
from speccompile.graph.layer_state import ABSORBED, RecurrentShape, checkpoint_state, recurrent_state
from speccompile.graph.state import N, S, StateSpec, core_state, resolve_layout
from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots
from support.engine_parts import request_of
from support.known_texts import shared_beginning

PLACES, INTERVAL = 24, 5
CHECKPOINTS = (PLACES - 1) // INTERVAL
RECURRENCES = {"conv_0": RecurrentShape((), 1, 2), "delta_0": RecurrentShape((1,), 1)}


def small_arena() -> Arena:
    specs = [
        *core_state(8),
        StateSpec("kv", (N, S, 1), torch.float32, reset=False),
        *recurrent_state(RECURRENCES),
        *checkpoint_state(RECURRENCES, CHECKPOINTS),
    ]
    layout = resolve_layout(specs, max_batch=3, max_len=PLACES, max_draft_len=1, max_width=2, vocab_size=8)
    return Arena(layout, torch.device("cpu"))


def state_of(text: list[int]) -> float:
    """Stands in for a state, and for KV: it depends on all tokens of ``text``."""
    return float(hash(tuple(text)) % 2**20)


@dataclass
class Held:
    """What a slot is expected to hold: a sequence's tokens with KV, and the places of states of it."""

    text: list[int] = field(default_factory=list)
    place: int = 0
    checkpoints: list[int] = field(default_factory=list)

    def known(self, prompt: list[int]) -> tuple[int, int]:
        """Tokens of the prompt that need not be read, and those that have KV."""
        shared = shared_beginning(prompt[:-1], self.text)
        if 0 < self.place <= shared:
            return shared, shared
        return max((place for place in self.checkpoints if place <= shared), default=0), shared


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_a_prompt_goes_on_from_the_last_state_that_is_known_in_it(data: st.DataObject) -> None:
    """Any order of takes, prompt chunks, steps and ends, over a small alphabet."""
    arena = small_arena()
    slots = Slots(arena, lambda: 0, reuse=True, clear=False, state_checkpoints=INTERVAL)
    held = {slot: Held() for slot in range(3)}
    running: list[Request] = []

    def run(request: Request, place: int, cached: int) -> None:
        """A step or chunk after which the state has absorbed ``place`` tokens, and ``cached`` have KV."""
        text, slot = request.prompt + request.new_tokens, request.slot
        for at in range(request.cached, cached):
            arena["kv"][slot, at] = state_of(text[: at + 1])
        arena["delta_0"][slot] = arena["conv_0_kept"][slot] = state_of(text[:place])
        arena[ABSORBED][slot] = place
        request.cached = cached
        now = held[slot]
        now.text, now.place = text[:cached], place
        slots.save_checkpoint(request)
        if place >= INTERVAL and all(known // INTERVAL != place // INTERVAL for known in now.checkpoints):
            now.checkpoints.append(place)

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "take", "read", "read", "step", "step", "end", "fail"]))
        if action == "take" and len(running) < 3:
            prompt = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=PLACES - 6))
            before = {slot: Held(now.text, now.place, list(now.checkpoints)) for slot, now in held.items()}
            known = {slot: now.known(prompt) for slot, now in before.items()}
            length, shared = max(length for length, _ in known.values()), max(shared for _, shared in known.values())
            request = request_of(arena, prompt)
            slots.take(request)
            slot = request.slot
            assert (request.cached, request.stats.reused_tokens) == (length, length)
            assert request.stats.reread_tokens == shared - length
            assert arena["kv"][slot, :length, 0].tolist() == [state_of(prompt[: at + 1]) for at in range(length)]
            place = int(arena[ABSORBED][slot])
            assert place <= length and (place > 0) == (length > 0)
            if place:
                assert float(arena["delta_0"][slot]) == state_of(prompt[:place])
                assert arena["conv_0_kept"][slot].unique().tolist() == [state_of(prompt[:place])]
            # The checkpoints of the prefix are those of one of the slots that knew it.
            places = sorted(slots._checkpoints._positions[slot].values())
            sources = [now for slot, now in before.items() if length and known[slot][0] == length]
            wanted = [sorted(place for place in now.checkpoints if place <= length) for now in sources]
            assert places in wanted or (not length and not places)
            held[slot] = Held(prompt[:length], place, places)
            running.append(request)
        elif action == "read" and running:
            request = data.draw(st.sampled_from(running))
            if request.cached < len(request.prompt):
                cached = min(len(request.prompt), request.cached + data.draw(st.integers(1, 6)))
                run(request, cached, cached)
        elif action == "step" and running:
            request = data.draw(st.sampled_from(running))
            length = len(request.prompt) + len(request.new_tokens)
            if request.cached >= len(request.prompt) - 1 and len(request.new_tokens) < 4:
                # The newest token is not absorbed yet, and the step emits one or two.
                request.add(data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2)))
                run(request, length - 1, len(request.prompt) + len(request.new_tokens) - 1)
        elif action in ("end", "fail") and running:
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            request.end("error" if action == "fail" else "stop", RuntimeError() if action == "fail" else None)
            # A stop on the host drops tokens of a step in flight: the state may stand after the end of the sequence.
            request.cached = max(0, request.cached - data.draw(st.integers(0, 2)))
            held[request.slot].text = held[request.slot].text[: request.cached]
            slots.release(request)
            if action == "fail":
                held[request.slot] = Held()
        for slot, now in held.items():
            for index, place in slots._checkpoints._positions[slot].items():
                for name in ("delta_0", "conv_0"):
                    found = arena[f"{name}_checkpoints"][slot, index].unique().tolist()
                    assert found == [state_of(now.text[:place])] or place > len(now.text)


def test_a_checkpoint_has_the_state_of_a_recurrence_and_the_window_of_a_convolution() -> None:
    """What a recurrence keeps beside its state is of no use there: the next chunk begins at that place."""
    names = {spec.name: spec.shape for spec in checkpoint_state(RECURRENCES, 4)}
    assert names == {"conv_0_checkpoints": (N - 1, 4, *_kept_of("conv_0")), "delta_0_checkpoints": (N - 1, 4, 1)}
    assert checkpoint_state(RECURRENCES, 0) == checkpoint_state({}, 4) == []


def _kept_of(name: str) -> tuple[object, ...]:
    return next(spec.shape[1:] for spec in recurrent_state(RECURRENCES) if spec.name == f"{name}_kept")

"""Slots alone, without a model: what a slot is said to hold is what is there."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from speccompile.graph.arena import Arena
from speccompile.graph.state import N, S, StateSpec, core_state, resolve_layout
from speccompile.runtime.request import Request
from speccompile.runtime.slots import Slots
from support.engine_parts import request_of
from support.known_texts import shared_beginning

PLACES = 24


def small_arena() -> Arena:
    specs = [*core_state(8), StateSpec("kv", (N, S, 2), torch.int64, reset=False)]
    layout = resolve_layout(specs, max_batch=3, max_len=PLACES, max_draft_len=1, max_width=2, vocab_size=8)
    return Arena(layout, torch.device("cpu"))


def kv_of(text: list[int]) -> list[list[int]]:
    """Stands in for KV: it depends on the place and on all tokens up to it."""
    return [[place, hash(tuple(text[: place + 1]))] for place in range(len(text))]


@settings(deadline=None, max_examples=200)
@given(data=st.data())
def test_a_slot_holds_the_longest_known_beginning_and_nothing_wrong(data: st.DataObject) -> None:
    """Any order of takes, reads, tokens and ends, over a small alphabet: what a slot is said to hold is what is there,
    no other slot knows more, and of what is known as little as possible is given up."""
    arena = small_arena()
    weights = [0]
    slots = Slots(arena, lambda: weights[0], reuse=True, clear=False)
    running: list[Request] = []
    # Slots in the order in which they became free, with what each one holds of which weights.
    free: dict[int, tuple[int, list[int]]] = {slot: (0, []) for slot in range(3)}
    born: dict[Request, int] = {}

    def write(request: Request, count: int) -> None:
        text = request.prompt + request.new_tokens
        for place in range(request.cached, min(request.cached + count, len(text))):
            arena["kv"][request.slot, place] = torch.tensor(kv_of(text)[place])
        request.cached = min(request.cached + count, len(text))

    for _ in range(data.draw(st.integers(1, 25))):
        action = data.draw(st.sampled_from(["take", "take", "read", "add", "end", "end", "fail", "change"]))
        if action == "take" and free:
            text = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=PLACES - 4))
            known = [(texts, free_slot) for free_slot, texts in free.items()]
            known += [((born[r], (r.prompt + r.new_tokens)[: r.cached]), r.slot) for r in running]
            most = max((shared_beginning(text[:-1], held) for (of, held), _ in known if of == weights[0]), default=0)
            request = request_of(arena, text)
            slots.take(request)
            assert request.cached == request.stats.reused_tokens == most
            assert arena["kv"][request.slot, :most].tolist() == kv_of(text[:most])
            assert arena["tokens"][request.slot, : len(text)].tolist() == text
            taken_from = free.pop(request.slot)
            if most and taken_from == (weights[0], text[:most]):
                pass  # Its own text goes on: nothing is given up.
            elif any(not held for _, held in free.values()):
                assert not taken_from[1], "an empty slot was left"
            elif most:
                whole = [slot for slot, held in free.items() if held == (weights[0], text[:most])]
                assert not whole, "one whose text goes on was left"
            running.append(request)
            born[request] = weights[0]
        elif action == "read" and running:
            write(data.draw(st.sampled_from(running)), data.draw(st.integers(1, 9)))
        elif action == "add" and running:
            request = data.draw(st.sampled_from(running))
            if request.cached >= len(request.prompt) - 1 and len(request.new_tokens) < 4:
                request.add([data.draw(st.integers(0, 1))])
                write(request, len(request.prompt) + len(request.new_tokens) - 1 - request.cached)
        elif action in ("end", "fail") and running:
            request = running.pop(data.draw(st.integers(0, len(running) - 1)))
            request.end("error" if action == "fail" else "eos", RuntimeError() if action == "fail" else None)
            slots.release(request)
            text = (request.prompt + request.new_tokens)[: request.cached]
            free[request.slot] = (born[request], [] if action == "fail" else text)
            if action == "fail":
                assert not arena["kv"][request.slot].any()
        elif action == "change":
            weights[0] += 1
        assert slots.free == len(free)
        assert slots.owned == running or sorted(map(id, slots.owned)) == sorted(map(id, running))


def test_reset_keeps_kv_and_clearing_takes_what_is_behind_the_text() -> None:
    """A new owner that reads dead positions finds none of a former one's."""
    for clear in (False, True):
        arena = small_arena()
        slots = Slots(arena, lambda: 0, reuse=True, clear=clear)
        arena["kv"].fill_(7)
        request = request_of(arena, [1, 2, 3])
        slots.take(request)
        assert bool(arena["kv"][request.slot].any()) is not clear
        assert (arena["kv"][[slot for slot in range(4) if slot != request.slot]] == 7).all()

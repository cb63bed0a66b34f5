"""Which request owns which slot, and whose KV the free ones still hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from speccompile.graph.arena import Arena
from speccompile.runtime.request import Request


class Slots:
    """Hands out slots, with the KV of the longest known beginning of a prompt in place.

    A finished request's KV stays in its slot until another one needs that. A prompt that begins like that text, or like
    the text of a request that still runs, is not read again so far: its slot keeps the KV, or gets a copy of it, and
    prefill begins behind it.

    Args:
        state_of_weights: differs from before when KV from before is no longer the model's.
        reuse: whether to look for known beginnings at all.
        clear: whether a new owner's attention reads places that its text has not reached, if only to hide them.
    """

    def __init__(self, arena: Arena, state_of_weights: Callable[[], Hashable], *, reuse: bool, clear: bool) -> None:
        self._arena = arena
        self._state_of_weights = state_of_weights
        self._reuse = reuse
        self._clear = clear
        # Places at the end of a known beginning that depend on what came behind it there.
        self._lag = max(tensor.looks_ahead for tensor in arena.layout.tensors.values())
        self._weights: dict[int, Hashable] = {}
        self._owners: dict[int, Request] = {}
        # Least recently used first, with the tokens whose KV each one holds.
        self._free: dict[int, list[int]] = {slot: [] for slot in range(arena.layout.max_batch)}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def owned(self) -> list[Request]:
        return list(self._owners.values())

    def take(self, request: Request) -> None:
        """Give ``request`` a slot and write its prompt and limits there; one has to be free."""
        prompt, layout = request.prompt, self._arena.layout
        weights = self._state_of_weights()
        source, shared = -1, 0
        if self._reuse and request.params.reuse:
            source, shared = self._longest_beginning(prompt, weights)
        slot = self._choose(source, shared)
        del self._free[slot]
        self._owners[slot] = request
        self._weights[slot] = weights
        request.admit(slot, shared)
        arena = self._arena
        arena.reset_slot(slot)
        if shared and source != slot:
            arena.copy_text_state(source, slot, shared)
        if self._clear:
            arena.clear_text_state(slot, shared)
        arena.write("tokens", slot, prompt)
        arena.write("length", slot, len(prompt))
        arena.write("prompt_length", slot, len(prompt))
        arena.write("limit", slot, min(len(prompt) + request.params.max_new_tokens, layout.max_len))
        if request.params.num_draft_tokens is not None:
            arena.write("draft_limit", slot, request.params.num_draft_tokens)
        arena.write("eos", slot, request.params.eos)
        if request.params.sampling is not None:
            request.params.sampling.place(arena, slot, len(prompt))
        arena.write("alive", slot, True)

    def give_back(self, request: Request) -> None:
        """The request has ended; of one that failed, nothing stays in the slot."""
        slot = request.slot
        del self._owners[slot]
        self._arena.reset_slot(slot)
        if request.error is not None:
            self._arena.clear_text_state(slot, 0)
        self._free[slot] = _text_with_kv(request) if request.error is None else []

    def _longest_beginning(self, prompt: Sequence[int], weights: Hashable) -> tuple[int, int]:
        """The slot whose KV begins like ``prompt`` for longest (-1 if none does), and for how many tokens. The prompt's
        last token is left to be computed: its logits choose the first new one."""
        texts = self._free | {slot: _text_with_kv(request) for slot, request in self._owners.items()}
        lengths = {
            slot: max(0, _shared(prompt, text, len(prompt) - 1) - self._lag)
            for slot, text in texts.items()
            if self._weights.get(slot) == weights
        }
        lengths = {slot: length for slot, length in lengths.items() if length}

        def preference(slot: int) -> tuple[int, bool, bool]:
            # Of equals, a free slot: its KV need not be copied. Of these, one that holds no more: nothing is given up.
            free = slot in self._free
            return lengths[slot], free and len(self._free[slot]) == lengths[slot] + self._lag, free

        source = max(lengths, key=preference, default=-1)
        return source, lengths.get(source, 0)

    def _choose(self, source: int, shared: int) -> int:
        """The source itself, if it is free and its text goes on as the prompt does; else the one that is missed least,
        so that a beginning which many prompts share stays known."""
        if source in self._free and shared and shared + self._lag == len(self._free[source]):
            return source
        empty = [slot for slot, text in self._free.items() if not text]
        others = [slot for slot in self._free if slot != source]
        return (empty or others or [source])[0]


def _text_with_kv(request: Request) -> list[int]:
    return (request.prompt + request.new_tokens)[: request.cached]


def _shared(prompt: Sequence[int], text: Sequence[int], most: int) -> int:
    """How many tokens both begin with, at most ``most``."""
    for index, (wanted, held) in enumerate(zip(prompt[:most], text, strict=False)):
        if wanted != held:
            return index
    return min(most, len(text))

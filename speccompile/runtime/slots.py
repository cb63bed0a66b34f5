"""Which request owns which slot, and which sequences' KV the free slots still hold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from speccompile.graph.arena import Arena
from speccompile.runtime.request import Request


class Slots:
    """Assigns slots, and reuses the KV of the longest known prefix of a prompt.

    A finished request's KV stays in its slot until another request needs the slot. If a prompt shares a prefix with
    that sequence, or with that of a running request, its slot keeps or receives a copy of the prefix's KV, and prefill
    begins after it. A recurrent state stands near the end of its sequence: a prefix that ends before that place cannot
    be reused.

    Args:
        state_of_weights: changes when KV that was computed before is no longer the model's.
        reuse: whether to look for known prefixes.
        clear: whether attention reads places after the end of a sequence, if only to mask them.
    """

    def __init__(self, arena: Arena, state_of_weights: Callable[[], Hashable], *, reuse: bool, clear: bool) -> None:
        self._arena = arena
        self._state_of_weights = state_of_weights
        self._reuse = reuse
        self._clear = clear
        # The last places of a known prefix, whose state depends on tokens after the prefix.
        self._lookahead = max(tensor.looks_ahead for tensor in arena.layout.tensors.values())
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
        """Assign a free slot to ``request``, and write its prompt and limits into the arena. There must be one."""
        prompt, layout = request.prompt, self._arena.layout
        weights = self._state_of_weights()
        source, shared = -1, 0
        if self._reuse and request.params.reuse:
            source, shared = self._longest_prefix(prompt, weights)
        if source in self._owners and self._is_spoiled(self._owners[source]):
            source, shared = -1, 0
        slot = self._choose(source, shared)
        del self._free[slot]
        self._owners[slot] = request
        self._weights[slot] = weights
        request.admit(slot, shared)
        arena = self._arena
        arena.reset_slot(slot)
        if source != slot or not shared:
            arena.start_recurrent_state(source if shared else None, slot)
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
        if request.params.prediction:
            arena.write("prediction", slot, request.params.prediction)
            arena.write("prediction_length", slot, len(request.params.prediction))
        arena.write("eos", slot, request.params.eos)
        if request.params.sampling is not None:
            request.params.sampling.place(arena, slot, len(prompt))
        arena.write("alive", slot, True)

    def release(self, request: Request) -> None:
        """Free the slot of ``request``, which has ended. The state of a failed request is cleared."""
        slot = request.slot
        del self._owners[slot]
        self._arena.reset_slot(slot)
        failed = request.error is not None or self._is_spoiled(request)
        if failed:
            self._arena.clear_text_state(slot, 0)
        self._free[slot] = [] if failed else _text_with_kv(request)

    def _longest_prefix(self, prompt: Sequence[int], weights: Hashable) -> tuple[int, int]:
        """The slot whose KV shares the longest prefix with ``prompt`` (-1 if none does), and the length of that prefix.
        The prompt's last token never belongs to it: its logits choose the first new token."""
        texts = self._free | {slot: _text_with_kv(request) for slot, request in self._owners.items()}
        lengths = {
            slot: max(0, _common_prefix(prompt, text, len(prompt) - 1) - self._lookahead)
            for slot, text in texts.items()
            if self._weights.get(slot) == weights
        }
        lengths = {slot: length for slot, length in lengths.items() if length and self._goes_on(slot, length)}

        def preference(slot: int) -> tuple[int, bool, bool]:
            # Of equals a free slot, whose KV need not be copied. Of these one that holds no more, so that none is lost.
            free = slot in self._free
            return lengths[slot], free and len(self._free[slot]) == lengths[slot] + self._lookahead, free

        source = max(lengths, key=preference, default=-1)
        return source, lengths.get(source, 0)

    def _is_spoiled(self, request: Request) -> bool:
        """Whether the KV of ``request`` has a NaN. A first token shows that it has none. A NaN at a token spoils also
        the tokens before it that are read in the same step, whose KV other prompts could reuse: attention gives the
        later token no weight there, and 0 times NaN is NaN."""
        return not request.new_tokens and self._arena.text_state_has_nan(request.slot, request.cached)

    def _goes_on(self, slot: int, length: int) -> bool:
        """Whether the recurrent state of ``slot`` can go on after a prefix of that length. Beside it are the inputs of
        all tokens of the sequence that it has not absorbed."""
        place = self._arena.recurrent_place(slot)
        return place is None or 0 < place <= length

    def _choose(self, source: int, shared: int) -> int:
        """The source itself, if it is free and all of its sequence is a prefix of the prompt. Otherwise an empty slot
        or the least recently used one, so that a prefix which many prompts share stays known."""
        if source in self._free and shared and shared + self._lookahead == len(self._free[source]):
            return source
        empty = [slot for slot, text in self._free.items() if not text]
        others = [slot for slot in self._free if slot != source]
        return (empty or others or [source])[0]


def _text_with_kv(request: Request) -> list[int]:
    return (request.prompt + request.new_tokens)[: request.cached]


def _common_prefix(prompt: Sequence[int], text: Sequence[int], most: int) -> int:
    """Length of the common prefix, at most ``most``."""
    for index, (expected, cached) in enumerate(zip(prompt[:most], text, strict=False)):
        if expected != cached:
            return index
    return min(most, len(text))

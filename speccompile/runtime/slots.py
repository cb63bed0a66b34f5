"""The owners of slots, and the sequences whose KV free slots still hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace

from speccompile.adapters.buffers import OF_SLOT
from speccompile.errors import AdapterRemoved
from speccompile.graph.arena import Arena
from speccompile.runtime.page_pool import PagePool
from speccompile.runtime.request import Request
from speccompile.runtime.state_checkpoints import StateCheckpoints
from speccompile.runtime.unread_tokens import UnreadTokens


@dataclass(frozen=True)
class KnownPrefix:
    """The prefix of a prompt that a slot knows.

    Args:
        length: tokens that need not be processed.
        shared: tokens with KV in the slot. They are more than ``length`` if no recurrent state is known at their end.
        from_checkpoint: whether a checkpoint has the recurrent state at ``length``; else it is the slot's own.
    """

    length: int = 0
    shared: int = 0
    from_checkpoint: bool = False


class Slots:
    """Assigns slots, and reuses the KV of the longest known prefix of a prompt.

    A finished request's KV stays in its slot until another request needs the slot. A prompt may share a prefix with
    that sequence, or with that of a running request, and have the same adapter. Its slot then keeps or receives a copy
    of the prefix's KV, and prefill begins after it. A slot's recurrent state belongs to a position near the end of its
    sequence. If the shared prefix ends before that position, the tokens up to the last checkpoint in it are reused.

    Args:
        state_of_weights: returns a value that changes when earlier KV is no longer the model's.
        reuse: whether to look for known prefixes.
        clear: whether attention reads positions after the end of a sequence, even if it masks them.
        state_checkpoints: tokens between two checkpoints of a recurrent state; None keeps none.
        prompts_differ: the same tokens leave another state within a prompt than after it, so only prompts are known.
        unread: lets the drafter read a running request's tokens before they are copied; None if every step updates
            the drafter.
        rereads: whether the tokens of a running request may be read again, in another slot. Then a request only holds
            the pages that it needs so far. Otherwise it holds from the beginning all pages that it may need.
    """

    def __init__(
        self,
        arena: Arena,
        state_of_weights: Callable[[], Hashable],
        *,
        reuse: bool,
        clear: bool,
        state_checkpoints: int | None = None,
        prompts_differ: bool = False,
        unread: UnreadTokens | None = None,
        rereads: bool = True,
    ) -> None:
        self._arena = arena
        self._rereads = rereads
        self._state_of_weights = state_of_weights
        self._reuse = reuse
        self._clear = clear
        self._prompts_differ = prompts_differ
        self._unread = unread
        # Number of the last positions of a known prefix whose state depends on tokens after the prefix.
        self._lookahead = max(tensor.looks_ahead for tensor in arena.layout.tensors.values())
        self._weights: dict[int, Hashable] = {}
        self._owners: dict[int, Request] = {}
        self._checkpoints = StateCheckpoints(arena, state_checkpoints)
        # Results of known_length since a slot got or lost its owner, by the request's number, and their weights.
        self._known_lengths: dict[int, int] = {}
        self._known_weights: Hashable = None
        # Free slots, the least recently used first, with the numbers of the tokens whose KV each one holds.
        self._free: dict[int, list[int]] = {slot: [] for slot in range(arena.layout.max_batch)}
        paging = arena.layout.paging
        self.pool = None if paging is None else PagePool(arena, paging)

    @property
    def free(self) -> int:
        """Number of free slots."""
        return len(self._free)

    @property
    def known(self) -> list[list[int]]:
        """The tokens whose KV each free slot holds."""
        return list(self._free.values())

    @property
    def owned(self) -> list[Request]:
        """Requests that have a slot."""
        return list(self._owners.values())

    def fits(self, request: Request) -> bool:
        """Whether the pool has the pages that ``request`` needs, if free slots give up what they know."""
        pool = self.pool
        if pool is None:
            return True
        owned = pool.held_by(self._owners)
        missing = self._pages_needed(request, pool) - pool.free - len(pool.held_by(self._free) - owned)
        # Each running request may need another page soon, and would stop this one.
        missing += len(self._owners) if self._rereads else 0
        if missing > 0 and self._reuse and request.params.reuse:
            source, known = self._longest_prefix(request.known_by, (self._state_of_weights(), request.params.adapter))
            # A free source may give up its pages.
            if source in self._owners and not self._is_spoiled(self._owners[source]):
                missing -= pool.whole(known.length) // pool.page_size
        return missing <= 0

    def _pages_needed(self, request: Request, pool: PagePool) -> int:
        layout = self._arena.layout
        last = request.length
        if not self._rereads:
            last = min(len(request.prompt) + request.params.max_new_tokens, layout.max_len)
        return pool.pages_of(min(last + pool.ahead, layout.cache_len))

    def extend(self, request: Request, in_flight: int) -> bool:
        """Let ``request`` hold pages for its next step, which comes after ``in_flight`` steps whose results are not
        known. Return False if there are too few, also after free slots have given up what they know."""
        pool, layout = self.pool, self._arena.layout
        if pool is None:
            return True
        wanted = min(request.length + in_flight * layout.max_width + pool.ahead, layout.cache_len)
        missing = pool.pages_of(wanted) - pool.count(request.slot)
        if missing <= 0:
            return True
        self._reclaim(pool, missing)
        if pool.free < missing:
            return False
        pool.extend(request.slot, missing)
        return True

    def _reclaim(self, pool: PagePool, wanted: int, spared: Collection[int] = ()) -> None:
        """Release pages of free slots, of the least recently used one first and from its end, until ``wanted`` pages
        are free. The slots ``spared`` keep theirs."""
        for slot, tokens in self._free.items():
            while slot not in spared and pool.free < wanted and (held := pool.count(slot)):
                pool.release(slot, keep=held - 1)
                self._free[slot] = tokens[: (held - 1) * pool.page_size]
                if held == 1:
                    self._checkpoints.drop(slot)

    def stop(self, request: Request) -> None:
        """Free the slot of ``request``, which has not ended, and waits for another one. What it knows stays known."""
        self.release(request)
        request.stop()

    def take(self, request: Request) -> None:
        """Assign a free slot to ``request``, and write its prompt and limits into the arena. A slot must be free, and
        the request must fit (:meth:`fits`).

        Raises:
            AdapterRemoved: the request's adapter is not in the buffers any more.
        """
        adapter = request.params.adapter
        if adapter is not None and adapter.replaced:
            raise AdapterRemoved(name=adapter.name)
        weights = self._state_of_weights(), adapter
        source, known = -1, KnownPrefix()
        if self._reuse and request.params.reuse:
            source, known = self._longest_prefix(request.known_by, weights)
        if source in self._owners and self._is_spoiled(self._owners[source]):
            source, known = -1, KnownPrefix()
        if source in self._owners and self._unread is not None:
            self._unread.read_all(self._owners[source])
        slot = self._choose(source, known.length)
        shared = 0
        if self.pool is not None:
            source, known, shared = self._assign_pages(self.pool, request, slot, source, known)
        self._known_lengths, self._known_weights = {}, weights[0]
        del self._free[slot]
        self._owners[slot] = request
        self._weights[slot] = weights
        request.admit(slot, known.length, known.shared)
        self._arena.reset_slot(slot)
        self._start_state(source, slot, known, shared)
        if self._clear:
            self._arena.clear_text_state(slot, known.length)
        self._write(request)

    def _assign_pages(
        self, pool: PagePool, request: Request, slot: int, source: int, known: KnownPrefix
    ) -> tuple[int, KnownPrefix, int]:
        """Give ``slot`` its pages. Whole pages of a known prefix are shared with ``source``.

        Returns:
            The source, the prefix, and the positions that are shared. Without a source if its pages were needed.
        """
        needed, kept, shared = self._pages_needed(request, pool), list[int](), 0
        if known.length:
            # In its own slot also the page that the prefix ends in.
            shared = known.length if source == slot else pool.whole(known.length)
            kept = pool.first_pages(source, shared)
        if source == slot and shared > pool.whole(shared) and pool.is_shared(kept[-1]):
            # The request would write to a page of another slot, which knows no recurrent state at the prefix's end.
            source, known, kept, shared = -1, KnownPrefix(shared=known.shared), [], 0
        pool.release(slot, keep=len(kept) if source == slot else 0)
        self._reclaim(pool, needed - len(kept), spared=(slot, source))
        if needed - len(kept) > pool.free:
            # Its partly filled page would be copied.
            source, known, kept, shared = -1, KnownPrefix(shared=known.shared), [], 0
            self._reclaim(pool, needed)
        pool.assign(slot, kept, needed)
        return source, known, shared

    def _start_state(self, source: int, slot: int, known: KnownPrefix, shared: int) -> None:
        """Copy the state of the prefix that ``source`` holds to ``slot``, which shares its first ``shared``
        positions."""
        arena, checkpoints = self._arena, self._checkpoints
        if not known.length:
            arena.start_recurrent_state(None, slot)
            checkpoints.drop(slot)
            return
        checkpoints.take_over(source, slot, known.length)
        if source != slot:
            arena.copy_text_state(source, slot, known.length, shared)
        if known.from_checkpoint:
            checkpoints.start_at(slot, known.length)
        elif source != slot:
            arena.start_recurrent_state(source, slot)

    def _write(self, request: Request) -> None:
        """Write the prompt and limits of ``request`` into its slot."""
        arena, slot, prompt, adapter = self._arena, request.slot, request.prompt, request.params.adapter
        arena.write("tokens", slot, request.tokens)
        arena.write("length", slot, request.length)
        arena.write("prompt_length", slot, len(prompt))
        arena.write("limit", slot, min(len(prompt) + request.params.max_new_tokens, arena.layout.max_len))
        if adapter is not None:
            arena.write(OF_SLOT, slot, adapter.position)
        if request.params.features is not None:
            request.params.features.place(arena, slot)
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
        self._known_lengths = {}
        del self._owners[slot]
        self._arena.reset_slot(slot)
        failed = request.error is not None or self._is_spoiled(request)
        self._free[slot] = [] if failed else self._known_text(request)
        if self.pool is not None:
            self.pool.release(slot, keep=self.pool.pages_of(len(self._free[slot])))
        if failed:
            # Pages of it may belong to others, too. No query attends to what a later holder has not written.
            self._arena.clear_text_state(slot, 0)
            self._checkpoints.drop(slot)

    def known_length(self, request: Request) -> int:
        """Return the number of tokens of a waiting request's prompt that need not be processed if it gets a slot now.

        This assumes the weights of the newest request that got a slot: a search for changes would need more time than
        all other work.
        """
        if not self._reuse or not request.params.reuse:
            return 0
        if request.number not in self._known_lengths:
            weights = self._known_weights, request.params.adapter
            self._known_lengths[request.number] = self._longest_prefix(request.known_by, weights)[1].length
        return self._known_lengths[request.number]

    def will_know(self, request: Request, reader: Request) -> bool:
        """Whether ``request``, which waits, has fewer tokens to process after more of the prompt of ``reader``."""
        same = request.params.adapter is reader.params.adapter
        if not (self._reuse and request.params.reuse and same):
            return False
        shared = _common_prefix(request.known_by, reader.known_by, request.length - 1) - self._lookahead
        return shared > max(reader.cached, self.known_length(request))

    def save_checkpoint(self, request: Request) -> None:
        """Copy the recurrent state of ``request``, if a checkpoint is due. Called after each step and prompt chunk."""
        self._checkpoints.save(request.slot)

    def _longest_prefix(self, prompt: Sequence[int], weights: Hashable) -> tuple[int, KnownPrefix]:
        """Return the slot that knows the longest prefix of ``prompt`` (-1 if none knows any), and the prefix. The last
        token of the prompt never belongs to it: its logits choose the first new token."""
        texts = self._free | {slot: self._known_text(request) for slot, request in self._owners.items()}
        shared = {
            slot: max(0, _common_prefix(prompt, text, len(prompt) - 1) - self._lookahead)
            for slot, text in texts.items()
            if self._weights.get(slot) == weights
        }
        found = {slot: self._known(slot, length) for slot, length in shared.items()}

        def preference(slot: int) -> tuple[int, bool, bool]:
            # Among equals a free slot, whose KV is not copied; among these one that holds no more, so none is lost.
            # Whole pages are never copied. Those of an owner stay in any case, so a free slot can give up others.
            free, length = slot in self._free, found[slot].length
            whole = free and len(self._free[slot]) == length + self._lookahead
            return (length, whole, free) if self.pool is None else (length, not free, whole)

        source = max(found, key=preference, default=-1)
        most = max(shared.values(), default=0)
        if source < 0 or not found[source].length:
            return -1, KnownPrefix(shared=most)
        return source, replace(found[source], shared=most)

    def _known_text(self, request: Request) -> list[int]:
        """Return the numbers of the tokens of ``request`` whose KV another prompt may copy."""
        text = request.identities if self._prompts_differ else request.known_by
        return text[: request.cached]

    def _is_spoiled(self, request: Request) -> bool:
        """Whether the KV of ``request`` has a NaN. A request with a first token has none. A NaN at a token also spoils
        the tokens before it in the same step, whose KV other prompts could reuse: attention gives the later token the
        weight 0 there, and 0 times NaN is NaN."""
        return not request.new_tokens and self._arena.text_state_has_nan(request.slot, request.cached)

    def _known(self, slot: int, shared: int) -> KnownPrefix:
        """Return the prefix that ``slot`` knows of a prompt with which it shares the KV of ``shared`` tokens. The
        slot's own recurrent state can be used from its position on, since the slot also holds the inputs of all later
        tokens of the sequence."""
        position = self._arena.absorbed_tokens(slot)
        if position is None or 0 < position <= shared:
            return KnownPrefix(shared)
        return KnownPrefix(self._checkpoints.latest(slot, shared), from_checkpoint=True)

    def _choose(self, source: int, shared: int) -> int:
        """Return the source itself, if it is free and its whole sequence is a prefix of the prompt. Otherwise return an
        empty slot or the least recently used one, so a prefix that many prompts share stays known."""
        if source in self._free and shared and shared + self._lookahead == len(self._free[source]):
            return source
        empty = [slot for slot, text in self._free.items() if not text]
        others = [slot for slot in self._free if slot != source]
        return (empty or others or [source])[0]


def _common_prefix(prompt: Sequence[int], text: Sequence[int], most: int) -> int:
    """Return the length of the common prefix, at most ``most``."""
    low, high = 0, min(most, len(text))
    while low < high:
        # Slices compare without a loop in Python.
        middle = (low + high + 1) // 2
        if prompt[low:middle] == text[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

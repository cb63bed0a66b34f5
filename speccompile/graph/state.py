"""The state of a step between runs: named state tensors whose sizes are expressions, resolved once per wrap.

Shape symbols (sympy): ``N`` slots, including the dummy slot; ``S`` cache length; ``K`` the largest draft length; ``T``
the width of the widest step that commits; ``B`` rows of a step; ``E`` the largest number of a slot's EOS ids; ``V``
vocabulary.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import sympy
import torch

if TYPE_CHECKING:
    from speccompile.graph.paging import Paging

N, S, K, T, B, E, V = sympy.symbols("N S K T B E V", integer=True, positive=True)

#: The symbols that sizes of a :class:`StateSpec` may contain.
SIZES = frozenset({N, S, K, T, B, E, V})

EOS_CAPACITY = 8
#: The number of likeliest tokens that are recorded at each position of a prompt: the most that the OpenAI API returns.
PROMPT_TOP = 20


@dataclass(frozen=True)
class StateSpec:
    """One state tensor, with sizes as expressions.

    Args:
        name: unique in the arena.
        shape: ints and sympy expressions over the symbols of this module. A tensor whose first dimension is ``N`` is
            per-slot: a slot's part is reset to ``fill`` when a new request receives the slot.
        dtype: of the tensor.
        fill: value at the start and after a reset.
        low, high: bounds ``low <= value < high`` of an integer tensor, for printed examples; ``high`` may be an
            expression.
        reset: False for tensors that follow the sequence, ``[N, S, ...]`` (KV). Their state at a position depends only
            on the tokens up to it, and is not read after ``length``. It can be copied to another slot whose sequence
            begins with the same tokens.
        distinct: no value occurs twice (the slots of a step's rows).
        looks_ahead: for a tensor that follows the sequence: the number of tokens after a position that its state there
            depends on. Two sequences with a common beginning share so many positions fewer.
        initial: initial values of the first elements, for a tensor of one dimension that is not per-slot.
        recurrent: the tensor is the state of a recurrence for each slot. It is not reset, and is not read if the slot's
            :data:`~speccompile.graph.layer_state.ABSORBED` is 0.
        checkpoint_of: the name of the recurrent tensor ``[N, ...]`` of which this tensor has copies, ``[N - 1, C,
            ...]``. No step reads it.
        columns: the meaning of each column of a tensor of two dimensions.
        of_inputs: the tensor holds the inputs of requests beside their tokens, for each slot. The host writes it when a
            request receives the slot. No step changes it, and it is not reset.
        in_pages: for a tensor that follows the sequence: in a wrap with a pool of pages it is a part of the pool. Only
            the captured model reads and writes it.
    """

    name: str
    shape: tuple[int | sympy.Expr, ...]
    dtype: torch.dtype
    fill: float = 0
    low: int = 0
    high: int | sympy.Expr | None = None
    reset: bool = True
    distinct: bool = False
    initial: tuple[int, ...] = ()
    looks_ahead: int = 0
    recurrent: bool = False
    checkpoint_of: str = ""
    columns: tuple[str, ...] = ()
    in_pages: bool = False
    of_inputs: bool = False

    @property
    def per_slot(self) -> bool:
        """Whether the first dimension is N, the slots."""
        return len(self.shape) > 0 and self.shape[0] == N

    def resolve(self, sizes: Mapping[sympy.Symbol, int]) -> StateTensor:
        """The tensor with numbers instead of the size symbols."""
        # Not `subs`: it simplifies, which is a quarter of the time of wrapping a small model.
        values = {symbol: sympy.Integer(size) for symbol, size in sizes.items()}
        high = None if self.high is None else int(sympy.sympify(self.high).xreplace(values))
        shape = tuple(int(sympy.sympify(size).xreplace(values)) for size in self.shape)
        return StateTensor(
            self.name,
            shape,
            self.dtype,
            self.fill,
            self.low,
            high,
            self.per_slot and self.reset and not self.recurrent and not self.of_inputs,
            self.per_slot and not self.reset,
            self.distinct,
            self.initial,
            self.looks_ahead,
            self.recurrent,
            self.checkpoint_of,
            self.columns,
            self.in_pages,
            self.of_inputs,
        )


@dataclass(frozen=True)
class DrafterMemory:
    """The state of a drafter that outlives requests: what it has learned from their texts.

    Args:
        tables: names of the tensors.
        cursors: names of the per-slot tensors that refer to places in the tables. With zeros, a row begins its sequence
            anew.
    """

    tables: tuple[str, ...] = ()
    cursors: tuple[str, ...] = ()


@dataclass(frozen=True)
class StateTensor:
    """A :class:`StateSpec` with its sizes filled in."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    fill: float
    low: int
    high: int | None
    reset: bool
    follows_text: bool
    distinct: bool
    initial: tuple[int, ...]
    looks_ahead: int = 0
    recurrent: bool = False
    checkpoint_of: str = ""
    columns: tuple[str, ...] = ()
    in_pages: bool = False
    of_inputs: bool = False

    @property
    def per_slot(self) -> bool:
        """Whether its first dimension is the slots."""
        return self.reset or self.follows_text or self.recurrent or self.of_inputs

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.dtype.itemsize * math.prod(self.shape)


@dataclass(frozen=True)
class Layout:
    """All state tensors of one wrap, by name, and the sizes that they were resolved with.

    ``num_logits``, the outputs of the lm_head, is at most ``vocab_size``: prompts may have tokens that the lm_head
    cannot choose. ``paging`` is that of a layout whose KV is in pages (:mod:`speccompile.graph.paging`).
    """

    tensors: Mapping[str, StateTensor]
    max_batch: int
    max_len: int
    max_draft_len: int
    max_width: int
    vocab_size: int
    num_logits: int
    paging: Paging | None = None
    #: A paged layout with one piece of KV for each slot instead, over which models are captured.
    unpaged: Layout | None = field(default=None, repr=False, compare=False)

    @property
    def of_capture(self) -> Layout:
        """The layout over which models are captured."""
        return self if self.unpaged is None else self.unpaged

    @property
    def recurrent(self) -> dict[str, int]:
        """Bytes of one slot's recurrent state, by the tensor's name."""
        return {name: tensor.nbytes // tensor.shape[0] for name, tensor in self.tensors.items() if tensor.recurrent}

    @property
    def checkpoints(self) -> dict[str, StateTensor]:
        """Copies of recurrent state, by the name of the tensor that they are copies of."""
        return {tensor.checkpoint_of: tensor for tensor in self.tensors.values() if tensor.checkpoint_of}

    @property
    def sizes(self) -> set[int]:
        """All sizes of the state tensors that steps read."""
        return {size for tensor in self.tensors.values() if not tensor.checkpoint_of for size in tensor.shape}

    @property
    def dummy_slot(self) -> int:
        """The slot of padding rows. No request owns it."""
        return self.max_batch

    @property
    def cache_len(self) -> int:
        """S, the cache length."""
        return cache_len(self.max_len, self.max_width)


def cache_len(max_len: int, max_width: int) -> int:
    """S: ``max_len``, plus the width of one step. Every write of a step is then in bounds."""
    return max_len + max_width


def primes_clear_of(sizes: Iterable[int]) -> Iterator[int]:
    """Primes from 11 on that divide none of ``sizes``: example values for sizes that vary."""
    taken = {size for size in sizes if size > 0}
    for n in itertools.count(11):
        if all(n % d for d in range(2, math.isqrt(n) + 1)) and all(size % n for size in taken):
            yield n


def core_state(vocab_size: int) -> list[StateSpec]:
    """The state tensors of every mode. ``length`` is the number of committed tokens, including the newest."""
    i64 = torch.int64
    return [
        StateSpec("tokens", (N, S), i64, high=vocab_size),
        StateSpec("length", (N,), i64, low=1, high=S - K - 1),
        StateSpec("prompt_length", (N,), i64, low=1, high=S - K - 1),
        StateSpec("limit", (N,), i64, low=1, high=S - K),
        # The most drafts that a request allows. The fill value, far above K, means no limit.
        StateSpec("draft_limit", (N,), i64, fill=2**30, high=K + 1),
        StateSpec("alive", (N,), torch.bool, fill=0),
        StateSpec("eos", (N, E), i64, fill=-1, low=-1, high=vocab_size),
        # Results of the newest step, for the host: emitted tokens, accepted and proposed draft tokens.
        StateSpec("emitted", (N,), i64, high=K + 2),
        StateSpec("accepted", (N,), i64, high=K + 1),
        StateSpec("proposed", (N,), i64, high=K + 1),
        # Inputs of a run that the host writes: the slot of each row, and the slot and start of a prompt chunk.
        StateSpec("slots", (B,), i64, high=N, distinct=True),
        StateSpec("prefill_slot", (1,), i64, high=N),
        StateSpec("prefill_start", (1,), i64, high=1),
    ]


def recorded_state(vocab_size: int, chunk_width: int, *, scores: bool) -> list[StateSpec]:
    """State tensors that record, for the host, the scores that the newest step or prompt chunk chose its tokens from.

    Args:
        chunk_width: the width of the widest prompt chunk.
        scores: also record whole rows of logits and scores, and the drafts of a chain.
    """
    f32, best = torch.float32, (chunk_width, min(PROMPT_TOP, vocab_size))
    specs = [
        StateSpec("token_logprobs", (N, K + 1), f32),
        StateSpec("chunk_logprobs", (chunk_width,), f32),
        StateSpec("chunk_best", best, torch.int64, high=vocab_size),
        StateSpec("chunk_best_logprobs", best, f32),
    ]
    kept = [StateSpec(name, (N, K + 1, vocab_size), f32) for name in ("kept_logits", "kept_scores")]
    kept.append(StateSpec("kept_drafts", (N, K), torch.int64, fill=-1, low=-1, high=vocab_size))
    return specs + kept * scores


def resolve_layout(
    specs: Iterable[StateSpec],
    *,
    max_batch: int,
    max_len: int,
    max_draft_len: int,
    max_width: int,
    vocab_size: int,
    num_logits: int | None = None,
) -> Layout:
    """Resolve the sizes of all ``specs``.

    Args:
        max_width: T, the width of the widest step that commits.
        num_logits: the outputs of the lm_head; None, or more than ``vocab_size``, is ``vocab_size``.

    Raises:
        ValueError: two specs have one name.
    """
    sizes = {
        N: max_batch + 1,
        S: cache_len(max_len, max_width),
        K: max_draft_len,
        T: max_width,
        B: max_batch,
        E: EOS_CAPACITY,
        V: vocab_size,
    }
    tensors: dict[str, StateTensor] = {}
    for spec in specs:
        if spec.name in tensors:
            raise ValueError(f"two state tensors are called {spec.name!r}: give each its own name")
        tensors[spec.name] = spec.resolve(sizes)
    chosen = vocab_size if num_logits is None else min(num_logits, vocab_size)
    return Layout(tensors, max_batch, max_len, max_draft_len, max_width, vocab_size, chosen)

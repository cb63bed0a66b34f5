"""Processors of the sampling pipeline: request options, per-slot state, and one op on the scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch

from speccompile.graph.state import StateSpec
from speccompile.utils.numbers import is_int, is_real
from speccompile.utils.torch_private import OpOverload

#: Bounds of numbers that divide or multiply scores: beyond them, float32 scores could overflow.
SMALLEST, GREATEST = 1e-6, 1e6
#: Upper bound of whole numbers without their own bound: sums with other numbers fit into int64.
MOST = 2**31 - 1

SCHEMA = "(Tensor(a!) scores, Tensor context, Tensor length, int drafted, Tensor[] state) -> ()"

library = torch.library.Library("speccompile", "FRAGMENT")


def equals(value: Any, other: Any) -> bool:
    """Whether ``value == other``. A tensor or an array, which compares item by item, equals no value."""
    return (value == other) is True


@dataclass(frozen=True)
class Option:
    """A parameter of a request, as transformers names it.

    Args:
        name: the keyword.
        problem: returns why a value is not valid, given the vocabulary's size; None for a valid value.
        neutral: the value that has no effect, as None has.
        default: the value for a request that samples, if neither the request nor the model's generation_config has one.
        draws: whether the option only affects requests that draw their tokens (``do_sample=True``).
        forbids: whether the option only forbids tokens. It may then name ids that the lm_head cannot choose.
    """

    name: str
    problem: Callable[[Any, int], str | None]
    neutral: Any = None
    default: Any = None
    draws: bool = False
    forbids: bool = False

    def is_neutral(self, value: Any) -> bool:
        """Whether ``value`` has no effect."""
        if isinstance(self.neutral, list) and isinstance(value, tuple | Mapping):
            # An option of a list may also be a tuple, and sequence_bias a map.
            return not value
        return value is None or equals(value, self.neutral)


#: The processor whose function an op calls, by the op's name.
IMPLEMENTATIONS: dict[str, Any] = {}


def define_op(
    processor: Processor, name: str, dispatch_key: str, function: Callable[[Any], Callable[..., None]]
) -> None:
    """Define ``speccompile::<name>``, which calls ``function(processor)``."""
    known = name in IMPLEMENTATIONS
    IMPLEMENTATIONS[name] = processor
    if known:
        return
    library.define(f"{name}{SCHEMA}")
    library.impl(name, lambda *tensors: function(IMPLEMENTATIONS[name])(*tensors), dispatch_key)
    torch.library.register_fake(f"speccompile::{name}", lambda *_: None, lib=library)


class Processor(ABC):
    """One step of the pipeline between the target's logits and the chosen token.

    A new one is a subclass in its own file. One of this package is listed in :mod:`speccompile.sampling.pipeline`;
    one from outside is passed to :func:`speccompile.sampling.register_processor`. Its state is part of the arena, and
    every sampled step names it in its call of ``process_scores_``.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    #: Per-slot state; at its ``fill`` the processor does nothing for that slot.
    state: ClassVar[tuple[StateSpec, ...]]
    #: Core state (of :func:`speccompile.graph.state.core_state`) that it also reads.
    reads: ClassVar[tuple[str, ...]] = ()

    def has_effect(self, values: Mapping[str, Any]) -> bool:
        """Whether the processor must run for a slot with these options, as :meth:`place` receives them."""
        return True

    @abstractmethod
    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        """Return values for the slot's state, by name: numbers, or lists that leave the rest at ``fill``.

        Args:
            values: this processor's options that are not neutral, at least one.
            prompt_length: tokens of the prompt.
        """

    @abstractmethod
    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        """Change ``scores`` in place.

        Args:
            scores: float32 ``[B, T, V]``; those at position i choose the token after ``context[:, : length + i]``.
            context: int64 ``[B, S]``: each row's sequence, then its drafts, -1 where the row has fewer drafts than the
                tier.
            length: int64 ``[B]``, committed tokens.
            state: the state of the rows, ``[B, ...]``, in the order of ``state`` and ``reads``.
        """

    def call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        """Run the op, which is :meth:`apply`.

        Args:
            drafted: how many of the ``length`` tokens are drafts: 0, except in a drafter's own forwards.
        """
        self.apply(scores, context, length, *state)

    @property
    def op(self) -> OpOverload:
        """The op that applies the processor, ``speccompile::NAME_``."""
        overload: OpOverload = getattr(torch.ops.speccompile, f"{self.name}_").default
        return overload

    def register(self) -> None:
        """Define :attr:`op`, which a step's graph calls. An existing op of that name calls this processor from now
        on."""
        define_op(self, f"{self.name}_", "CompositeExplicitAutograd", lambda processor: processor.call)


def context_lengths(scores: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Number of tokens before each position, ``[B, T]``."""
    return length[:, None] + torch.arange(scores.shape[1], device=length.device)


def forbid(scores: torch.Tensor, ids: torch.Tensor) -> None:
    """Set to -inf the scores of ``ids`` ``[B, T, C]`` (or ``[B, 1, C]`` for all positions); -1 stands for no id."""
    vocab = scores.shape[-1]
    mask = torch.zeros(*ids.shape[:2], vocab + 1, dtype=torch.bool, device=scores.device)
    mask.scatter_(2, torch.where(ids < 0, vocab, ids), True)
    scores.masked_fill_(mask[..., :vocab], float("-inf"))


# --- what options may be -------------------------------------------------------------------------


def number(low: float, high: float = float("inf"), *, above: bool = False) -> Callable[[Any, int], str | None]:
    """The check of an option that is a number: ``low <= value <= high``, or ``low < value`` with ``above``."""

    def problem(value: Any, vocab: int) -> str | None:
        good = is_real(value)
        if good and (low < value if above else low <= value) and value <= high and value != float("inf"):
            return None
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        return f"it must be a number {bounds}" + ("" if high == float("inf") else f" and at most {high:g}")

    return problem


def whole(low: int, high: int = MOST) -> Callable[[Any, int], str | None]:
    """The check of an option that is an int from ``low`` to ``high``; it returns why a value is not valid, or None."""

    def problem(value: Any, vocab: int) -> str | None:
        if is_int(value) and low <= value <= high:
            return None
        return f"it must be an int of at least {low} and at most {high}"

    return problem


def token_ids(capacity: int, *, alone: bool = False) -> Callable[[Any, int], str | None]:
    """The check of an option that is a list of at most ``capacity`` token ids or, with ``alone``, one token id."""

    def problem(value: Any, vocab: int) -> str | None:
        values = as_ids(value) if alone else value
        if not isinstance(values, list | tuple):
            return "it must be a list of token ids"
        if len(values) > capacity:
            return f"it has {len(values)} ids, and a slot holds at most {capacity}"
        return next((wrong for item in values if (wrong := token_problem(item, vocab))), None)

    return problem


def token_problem(value: Any, vocab: int) -> str | None:
    """Return why ``value`` is not a valid token id, or None."""
    if is_int(value) and 0 <= value < vocab:
        return None
    return f"{value!r} is not a token id (0 .. {vocab - 1})"


def bias_problem(value: Any) -> str | None:
    """Return why ``value`` is not valid as a number that is added to scores, or None."""
    good = is_real(value)
    if good and (abs(value) <= GREATEST or value == -inf):
        return None
    return f"must be a number of at most {GREATEST:g} (or -inf)"


def as_ids(value: Any) -> Any:
    """One id as a list; a list unchanged."""
    return [value] if isinstance(value, int) else value

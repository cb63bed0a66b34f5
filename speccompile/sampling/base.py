"""What a processor of the sampling pipeline is: request options, per-slot state, and one op on the scores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar

import torch

from speccompile.graph.state import StateSpec
from speccompile.utils.devices import traits_of
from speccompile.utils.torch_private import OpOverload

#: Numbers that divide or multiply scores: beyond these, float32 scores could overflow.
SMALLEST, GREATEST = 1e-6, 1e6
#: Of whole numbers without their own bound, such as would not fit into int64 when others are added.
MOST = 2**31 - 1

SCHEMA = "(Tensor(a!) scores, Tensor context, Tensor length, int drafted, Tensor[] state) -> ()"

library = torch.library.Library("speccompile", "FRAGMENT")


@dataclass(frozen=True)
class Option:
    """A parameter of a request, as transformers names it.

    Args:
        name: of the keyword.
        problem: what is wrong with a value, given the vocabulary's size; None if nothing is.
        neutral: at this value, as at None, nothing happens.
        default: taken by a request that samples and says nothing, where the model's generation_config does neither.
        draws: it means something only to a request that draws its tokens (``do_sample=True``).
        forbids: it only forbids tokens, so it may name ids that the lm_head cannot choose.
    """

    name: str
    problem: Callable[[Any, int], str | None]
    neutral: Any = None
    default: Any = None
    draws: bool = False
    forbids: bool = False

    def is_neutral(self, value: Any) -> bool:
        """Whether ``value`` has no effect."""
        return value is None or bool(value == self.neutral)


#: Whose function an op calls, by the op's name.
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

    A new one is a subclass in its own file: of this package, listed in :mod:`speccompile.sampling.pipeline`; outside,
    passed to :func:`speccompile.sampling.register_processor`. Its state is part of the arena and its op a node of every
    sampled step.
    """

    name: ClassVar[str]
    options: ClassVar[tuple[Option, ...]]
    #: Per-slot state; at its ``fill`` the processor does nothing for that slot.
    state: ClassVar[tuple[StateSpec, ...]]
    #: Core state (of :func:`speccompile.graph.state.core_state`) that it reads besides.
    reads: ClassVar[tuple[str, ...]] = ()
    #: Its state is too large to be gathered in every step: it comes whole, after the rows' slots ``[B]``.
    whole: ClassVar[bool] = False

    @abstractmethod
    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        """What goes into the slot's state, by name: numbers, or lists that leave the rest at ``fill``.

        Args:
            values: this processor's options that are not neutral, at least one.
        """

    @abstractmethod
    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        """Change ``scores`` in place.

        Args:
            scores: float32 ``[B, T, V]``; those of place i choose the token after ``context[:, : length + i]``.
            context: int64 ``[B, S]``: each row's sequence, then its drafts, -1 where the row has fewer drafts than the
                tier.
            length: int64 ``[B]``, committed tokens.
            state: of the rows, ``[B, ...]``, in the order of ``state`` and ``reads``.
        """

    def call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        """What the op does: :meth:`apply`, unless no row wants anything.

        Args:
            drafted: how many of the ``length`` tokens are drafts: 0, but for a drafter's own forwards.
        """
        if not traits_of(scores.device).host_memory or self.active(*state):
            self.apply(scores, context, length, *state)

    def active(self, *state: torch.Tensor) -> bool:
        """Whether any row wants anything. Asked on the CPU alone, where looking costs nothing."""
        return bool((state[0] != self.state[0].fill).any())

    @property
    def op(self) -> OpOverload:
        """The op that applies the processor, ``speccompile::NAME_``."""
        overload: OpOverload = getattr(torch.ops.speccompile, f"{self.name}_").default
        return overload

    def register(self) -> None:
        """Define :attr:`op`, which is what a step's graph calls. An op of that name, if there is one, calls this
        processor from now on."""
        define_op(self, f"{self.name}_", "CompositeExplicitAutograd", lambda processor: processor.call)


def context_lengths(scores: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
    """Tokens before each place, ``[B, T]``."""
    return length[:, None] + torch.arange(scores.shape[1], device=length.device)


def forbid(scores: torch.Tensor, ids: torch.Tensor) -> None:
    """Set to -inf the scores of ``ids`` ``[B, T, C]`` (or ``[B, 1, C]`` for all places), -1 where there is none."""
    vocab = scores.shape[-1]
    mask = torch.zeros(*ids.shape[:2], vocab + 1, dtype=torch.bool, device=scores.device)
    mask.scatter_(2, torch.where(ids < 0, vocab, ids), True)
    scores.masked_fill_(mask[..., :vocab], float("-inf"))


# --- what options may be -------------------------------------------------------------------------


def number(low: float, high: float = float("inf"), *, above: bool = False) -> Callable[[Any, int], str | None]:
    """``low <= value <= high``, or ``low < value`` with ``above``."""

    def problem(value: Any, vocab: int) -> str | None:
        good = isinstance(value, int | float) and not isinstance(value, bool)
        if good and (low < value if above else low <= value) and value <= high and value != float("inf"):
            return None
        bounds = f"above {low:g}" if above else f"of at least {low:g}"
        return f"it has to be a number {bounds}" + ("" if high == float("inf") else f" and at most {high:g}")

    return problem


def whole(low: int, high: int = MOST) -> Callable[[Any, int], str | None]:
    """The check of an option that is an int from ``low`` to ``high``; it returns what is wrong, or None."""

    def problem(value: Any, vocab: int) -> str | None:
        if isinstance(value, int) and not isinstance(value, bool) and low <= value <= high:
            return None
        return f"it has to be an int of at least {low} and at most {high}"

    return problem


def token_ids(capacity: int, *, alone: bool = False) -> Callable[[Any, int], str | None]:
    """A list of at most ``capacity`` token ids, or, with ``alone``, also one of them."""

    def problem(value: Any, vocab: int) -> str | None:
        values = as_ids(value) if alone else value
        if not isinstance(values, list | tuple):
            return "it has to be a list of token ids"
        if len(values) > capacity:
            return f"it has {len(values)} ids, and a slot has room for {capacity}"
        return next((wrong for item in values if (wrong := token_problem(item, vocab))), None)

    return problem


def token_problem(value: Any, vocab: int) -> str | None:
    """What is wrong with a token id; None if nothing is."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab:
        return None
    return f"{value!r} is not a token id (0 .. {vocab - 1})"


def bias_problem(value: Any) -> str | None:
    """What is wrong with a number that is added to scores; None if nothing is."""
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if good and (abs(value) <= GREATEST or value == -inf):
        return None
    return f"must be a number of at most {GREATEST:g} (or -inf)"


def as_ids(value: Any) -> Any:
    """One id as a list; a list as it is."""
    return [value] if isinstance(value, int) else value

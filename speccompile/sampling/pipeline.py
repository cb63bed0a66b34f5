"""The order of the sampling pipeline: the processors of this package, and those registered from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

import torch

import speccompile.sampling.on_cuda  # noqa: F401  kernels of top-k and top-p
from speccompile.errors import InvalidOption
from speccompile.graph.state import N, StateSpec
from speccompile.sampling.allowed import AllowedTokens
from speccompile.sampling.base import Option, Processor
from speccompile.sampling.ends import ForcedEos, MinNewTokens
from speccompile.sampling.guide import FollowGuide
from speccompile.sampling.host import HostProcessors, Watermark
from speccompile.sampling.lists import BeginSuppressTokens, LogitBias, SuppressTokens
from speccompile.sampling.min_p import MinP
from speccompile.sampling.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from speccompile.sampling.sequences import BadWords, NoRepeatNgram
from speccompile.sampling.temperature import Temperature
from speccompile.sampling.top_k import TopK
from speccompile.sampling.top_p import TopP
from speccompile.sampling.typical_p import TypicalP

PENALTIES: tuple[Processor, ...] = (
    LogitBias(),
    RepetitionPenalty(),
    PresencePenalty(),
    FrequencyPenalty(),
    NoRepeatNgram(),
    BadWords(),
    MinNewTokens(),
    AllowedTokens(),
    FollowGuide(),
    ForcedEos(),
    SuppressTokens(),
    BeginSuppressTokens(),
)
#: They run after the processors of ``wrap(logits_processor=...)``, as in transformers; the penalties run before those.
WARPERS: tuple[Processor, ...] = (Temperature(), TopK(), TopP(), MinP(), TypicalP())
#: Python code of a request, before the warpers and after them. Only the target's scores go through these.
HOST_PROCESSORS: tuple[Processor, ...] = (HostProcessors(),)
WATERMARK: tuple[Processor, ...] = (Watermark(),)
#: Those of this package.
PROCESSORS = (*PENALTIES, *HOST_PROCESSORS, *WARPERS, *WATERMARK)
#: Request options by name, those of registered processors included.
OPTIONS: dict[str, Option] = {option.name: option for processor in PROCESSORS for option in processor.options}

for _processor in PROCESSORS:
    _processor.register()

#: By the name of the processor after which they run.
_registered: dict[str, list[Processor]] = {}


def register_processor(processor: Processor, *, after: str) -> None:
    """Add ``processor`` to the sampling pipeline of every model that is wrapped from now on.

    Its options are request options (``generate``, ``submit``), its state is in the arena of each slot, and its op is a
    node of every sampled step. Drafts stay possible, and the text stays independent of them.

    Args:
        after: the name of the penalty or warper after which it runs, one of :data:`PENALTIES` or :data:`WARPERS`
            (``"repetition_penalty"``, ``"top_p"``), or of a processor that was registered before.

    Raises:
        InvalidOption: it is not a processor, its name, an option or a state tensor exists already, or ``after`` is not
            a place.
    """

    def refuse(field: str, value: object, reason: str) -> NoReturn:
        raise InvalidOption(where="register_processor", name=field, value=value, reason=reason)

    if not isinstance(processor, Processor):
        refuse("processor", processor, "give an object of a class derived from speccompile.sampling.Processor")
    known = [*PROCESSORS, *registered_processors()]
    if processor.name in [item.name for item in known]:
        refuse("processor", processor, f"there is a processor called {processor.name!r}")
    if not processor.state:
        refuse("processor", processor, "it needs a state tensor, which holds what the request of a slot wants")
    for option in processor.options:
        if option.name in OPTIONS:
            refuse("processor", processor, f"there is a request option called {option.name!r}")
    for spec in processor.state:
        if spec.name in {other.name for other in sampling_state()}:
            refuse("processor", processor, f"there is a state tensor called {spec.name!r}")
    places = [item.name for item in (*PENALTIES, *WARPERS, *registered_processors())]
    if after not in places:
        refuse("after", after, f"use one of {', '.join(places)}")
    processor.register()
    _registered.setdefault(after, []).append(processor)
    OPTIONS.update({option.name: option for option in processor.options})


def registered_processors(state: Collection[str] | None = None) -> list[Processor]:
    """Processors registered from outside.

    Args:
        state: names of a speculator's state tensors: those that were registered when it was wrapped.
    """
    found = [processor for processors in _registered.values() for processor in processors]
    return found if state is None else [item for item in found if item.state[0].name in state]


def in_order(processors: Sequence[Processor], state: Collection[str] | None = None) -> Iterator[Processor]:
    """``processors`` of this package, each followed by those that are registered after it.

    Args:
        state: as :func:`registered_processors` has it.
    """
    for processor in processors:
        yield processor
        known = registered_processors(state)
        yield from in_order([item for item in _registered.get(processor.name, ()) if item in known], state)


def all_processors(state: Collection[str]) -> tuple[Processor, ...]:
    """The whole pipeline of a speculator with these state tensors, in running order."""
    return tuple(in_order(PROCESSORS, state))


def sampling_state() -> list[StateSpec]:
    """Per-slot state of all processors, and the seed."""
    processors = [*PROCESSORS, *registered_processors()]
    return [StateSpec("seed", (N,), torch.int64, high=2), *(spec for item in processors for spec in item.state)]

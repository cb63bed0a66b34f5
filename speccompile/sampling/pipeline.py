"""The order of the sampling pipeline: the processors of this package, and those registered from outside."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

import speccompile.sampling.on_cuda  # noqa: F401  kernels of top-k, top-p and min-p
from speccompile.graph.state import N, StateSpec
from speccompile.sampling.allowed import AllowedTokens
from speccompile.sampling.base import Option, Processor
from speccompile.sampling.cutoffs import Cutoffs
from speccompile.sampling.ends import ForcedEos, MinNewTokens
from speccompile.sampling.filters import FILTERS
from speccompile.sampling.guide import FollowGuide
from speccompile.sampling.host import HostProcessors, Watermark
from speccompile.sampling.lists import BeginSuppressTokens, LogitBias, SuppressTokens
from speccompile.sampling.normalization import RemoveInvalidValues, RenormalizeLogits
from speccompile.sampling.penalties import FrequencyPenalty, PresencePenalty, RepetitionPenalty
from speccompile.sampling.sequences import BadWords, NoRepeatNgram, SequenceBias
from speccompile.sampling.typical_p import TypicalP

PENALTIES: tuple[Processor, ...] = (
    LogitBias(),
    SequenceBias(),
    RepetitionPenalty(),
    PresencePenalty(),
    FrequencyPenalty(),
    NoRepeatNgram(),
    BadWords(),
    MinNewTokens(),
    AllowedTokens(),
    FollowGuide(),
    ForcedEos(),
    RemoveInvalidValues(),
    SuppressTokens(),
    BeginSuppressTokens(),
)
#: They run after the processors of ``wrap(logits_processor=...)``, as in transformers; the penalties run before them.
WARPERS: tuple[Processor, ...] = (*FILTERS, TypicalP(), Cutoffs())
#: Python code of a request, before the warpers and after them. It only changes the target's scores.
HOST_PROCESSORS: tuple[Processor, ...] = (HostProcessors(),)
WATERMARK: tuple[Processor, ...] = (Watermark(),)
#: Processors after all others.
LAST: tuple[Processor, ...] = (RenormalizeLogits(),)
#: All processors of this package.
PROCESSORS = (*PENALTIES, *HOST_PROCESSORS, *WARPERS, *WATERMARK, *LAST)
#: Request options by name, with those of registered processors.
OPTIONS: dict[str, Option] = {option.name: option for processor in PROCESSORS for option in processor.options}

for _processor in PROCESSORS:
    _processor.register()

#: The name of the state with the processors that each slot uses. Its columns are those of the wrap, whatever is
#: registered later.
USED_PROCESSORS = "used_processors"

#: Processors from outside, by the name of the processor after which they run (:mod:`speccompile.sampling.register`).
REGISTERED: dict[str, list[Processor]] = {}


def registered_processors(state: Collection[str] | None = None) -> list[Processor]:
    """Processors registered from outside.

    Args:
        state: names of a speculator's state tensors, to return only processors that were registered before its wrap.
    """
    found = [processor for processors in REGISTERED.values() for processor in processors]
    return found if state is None else [item for item in found if item.state[0].name in state]


def in_order(processors: Sequence[Processor], state: Collection[str] | None = None) -> Iterator[Processor]:
    """``processors`` of this package, each followed by those that are registered after it.

    Args:
        state: as for :func:`registered_processors`.
    """
    for processor in processors:
        yield processor
        known = registered_processors(state)
        yield from in_order([item for item in REGISTERED.get(processor.name, ()) if item in known], state)


def all_processors(state: Collection[str]) -> tuple[Processor, ...]:
    """The whole pipeline of a speculator with these state tensors, in running order."""
    return tuple(in_order(PROCESSORS, state))


def sampling_state(processors: Sequence[Processor] | None = None) -> list[StateSpec]:
    """Per-slot state of ``processors`` (None: all processors), the seed, and the processors that a slot uses."""
    known = [*PROCESSORS, *registered_processors()]
    return [
        StateSpec("seed", (N,), torch.int64, high=2),
        StateSpec(USED_PROCESSORS, (N, len(known)), torch.bool, columns=tuple(item.name for item in known)),
        *(spec for item in (known if processors is None else processors) for spec in item.state),
    ]

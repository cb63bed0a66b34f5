"""The sampling pipeline: what happens to the target's logits before a token is chosen, one file (or family) a step.

In the order, with the names and the values of transformers' logits processors and warpers.
"""

from __future__ import annotations

import torch

import speccompile.sampling.on_cuda  # noqa: F401  kernels of top-k and top-p
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
#: Behind the user's own processors, as in transformers; the penalties are in front of them.
WARPERS: tuple[Processor, ...] = (Temperature(), TopK(), TopP(), MinP(), TypicalP())
#: Python code of a request, before the warpers and after them. Only the target's scores go through these.
HOST_PROCESSORS: tuple[Processor, ...] = (HostProcessors(),)
WATERMARK: tuple[Processor, ...] = (Watermark(),)
PROCESSORS = (*PENALTIES, *HOST_PROCESSORS, *WARPERS, *WATERMARK)
OPTIONS: dict[str, Option] = {option.name: option for processor in PROCESSORS for option in processor.options}

for _processor in PROCESSORS:
    _processor.register()


def sampling_state() -> list[StateSpec]:
    """Per-slot state of all processors, and the seed."""
    return [StateSpec("seed", (N,), torch.int64, high=2), *(spec for item in PROCESSORS for spec in item.state)]

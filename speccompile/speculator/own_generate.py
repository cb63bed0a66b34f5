"""``generate`` of models whose class has a separate method for it, such as Whisper's: it cuts long audio, finds the
language, follows rules for timestamps, and calls transformers' common ``generate`` for each piece.

The model's method runs unchanged. What it calls is the speculator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import GenerationMixin, PreTrainedModel
from transformers.generation import (
    LogitsProcessorList,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from speccompile.sampling.lists import BEGIN_CAPACITY, SUPPRESS_CAPACITY

Decode = Callable[..., Any]


def own_generate(model: PreTrainedModel, decode: Decode) -> Decode | None:
    """The model's own ``generate``, with ``decode`` in the place of transformers' common one; None if the model's is
    the common one."""
    owner = next(kind for kind in type(model).__mro__ if "generate" in vars(kind))
    if owner is GenerationMixin or not model.config.is_encoder_decoder:
        return None

    class Common(GenerationMixin):
        def generate(self, inputs: Any = None, *, logits_processor: Any = None, **options: Any) -> Any:  # type: ignore[override]
            # The package's own processors run in the step, others on the host.
            given, others = _in_step(logits_processor)
            options = {name: value for name, value in options.items() if value is not None}
            # The config's lists are among the processors.
            options |= {"suppress_tokens": None, "begin_suppress_tokens": None, **given}
            return decode(inputs, logits_processor=others or None, **options)

    class Piecewise(owner, Common):  # type: ignore[misc, valid-type]
        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

        def __call__(self, *args: Any, **options: Any) -> Any:
            return model(*args, **options)

    found: Decode = Piecewise().generate
    return found


def _in_step(processors: LogitsProcessorList | None) -> tuple[dict[str, Any], list[Any]]:
    """The options of a step that do the same as some of ``processors``, and the other processors."""
    given: dict[str, Any] = {}
    others = []
    for processor in processors or ():
        if type(processor) is SuppressTokensLogitsProcessor:
            name, tokens, most = "suppress_tokens", processor.suppress_tokens, SUPPRESS_CAPACITY
        elif type(processor) is SuppressTokensAtBeginLogitsProcessor:
            name, tokens, most = "begin_suppress_tokens", processor.begin_suppress_tokens, BEGIN_CAPACITY
        else:
            others.append(processor)
            continue
        if len(tokens) > most:
            others.append(processor)
        else:
            given[name] = tokens.tolist()
    return given, others

"""Logits processors of one request: Python code that is called on the host, in the middle of a step."""

from __future__ import annotations

import itertools
import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from transformers.generation import BaseWatermarkingConfig

from speccompile.errors import InvalidInput, InvalidOption, error_line
from speccompile.graph.state import N, StateSpec
from speccompile.sampling.base import Option, Processor
from speccompile.utils.devices import traits_of
from speccompile.utils.workers import out_of_pool

#: ``processor(input_ids [1, P + new] int64, scores [1, V] float32) -> scores [1, V]``.
HostProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

#: Options of a request that are called on the host; its row has no drafts.
CALLED_ON_HOST = ("logits_processor", "watermarking_config")

_calls: weakref.WeakValueDictionary[int, HostCall] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


class HostCall:
    """The Python code of one request, called on the host once for each of its tokens.

    Args:
        processors: called before temperature, top_k, ...; they may keep state between the request's tokens.
        watermark: called after temperature, top_k, ...; or None.
        shown: the prompt as the caller gave it, int64 ``[1, P]``, with its padding.
        prompt_length: tokens of the prompt without padding.
        num_logits: processors receive the scores of so many tokens, those that the lm_head can choose.
    """

    def __init__(
        self,
        processors: Sequence[HostProcessor],
        watermark: HostProcessor | None,
        shown: torch.Tensor,
        prompt_length: int,
        num_logits: int,
    ) -> None:
        self.processors = tuple(processors)
        self.watermark = () if watermark is None else (watermark,)
        self._shown, self._prompt_length, self._num_logits = shown, prompt_length, num_logits
        #: The exception that a processor raised.
        self.error: BaseException | None = None
        #: Its value of ``host_call`` in the state of its slot.
        self.number = next(_numbers)
        _calls[self.number] = self

    def run(self, processors: Sequence[HostProcessor], scores: torch.Tensor, text: torch.Tensor) -> None:
        """Change ``scores`` ``[V]`` in place; where a processor fails they become NaN, which ends the request.

        Args:
            text: int64 ``[length]``, committed tokens.
        """
        shown = self._shown.to(text.device, torch.int64)
        input_ids = torch.cat([shown, text[None, self._prompt_length :]], dim=1)
        chosen = scores[: self._num_logits]
        given = chosen[None].clone()
        try:
            # A processor may run a model.
            with out_of_pool():
                for processor in processors:
                    given = _checked(processor, processor(input_ids, given), chosen)
            chosen.copy_(given[0])
        except BaseException as error:
            # The step has other requests too: the engine ends this one with its error after the step.
            self.error = error
            scores.fill_(float("nan"))


def _checked(processor: HostProcessor, returned: Any, scores: torch.Tensor) -> torch.Tensor:
    if isinstance(returned, torch.Tensor) and returned.shape == (1, len(scores)):
        return returned
    what = f"shape {list(returned.shape)}" if isinstance(returned, torch.Tensor) else repr(returned)
    name = getattr(processor, "__name__", type(processor).__name__)
    reason = f"{name} must return a tensor of shape [1, {len(scores)}], got {what}"
    raise InvalidInput(name="logits_processor", reason=reason)


def _problem(value: Any, vocab: int) -> str | None:
    if callable(value) or (isinstance(value, list | tuple) and all(callable(item) for item in value)):
        return None
    return "it must be a LogitsProcessor or a list of them, callable with (input_ids, scores)"


def _watermark_problem(value: Any, vocab: int) -> str | None:
    if isinstance(value, BaseWatermarkingConfig):
        return None
    return "it must be transformers' WatermarkingConfig or SynthIDTextWatermarkingConfig"


class _OnHost(Processor):
    """An op that calls the Python code of each row's request. It only changes the first position of a row, which has no
    drafts."""

    def place(self, values: Mapping[str, Any], prompt_length: int) -> dict[str, Any]:
        # The engine writes ``host_call`` before the step that chooses the first token: chunks of a prompt choose none.
        return {}

    def call(
        self,
        scores: torch.Tensor,
        context: torch.Tensor,
        length: torch.Tensor,
        drafted: int,
        state: Sequence[torch.Tensor],
    ) -> None:
        # A CUDA graph cannot call the host; requests with host processors are refused there.
        if traits_of(scores.device).host_memory or not torch.cuda.is_current_stream_capturing():
            self.apply(scores, context, length, *state)

    def apply(self, scores: torch.Tensor, context: torch.Tensor, length: torch.Tensor, *state: torch.Tensor) -> None:
        (numbers,) = state
        for row, number in enumerate(numbers.tolist()):
            host_call = _calls.get(number)
            if host_call is not None and host_call.error is None and (processors := self.of(host_call)):
                host_call.run(processors, scores[row, 0], context[row, : int(length[row])])

    @abstractmethod
    def of(self, host_call: HostCall) -> tuple[HostProcessor, ...]:
        """The processors to call, in order."""


class HostProcessors(_OnHost):
    """The request's ``logits_processor``, as transformers' ``generate`` accepts it."""

    name = "host_processors"
    options: ClassVar = (Option("logits_processor", _problem, neutral=[]),)
    #: The number of the request's :class:`HostCall`, 0 for none.
    state: ClassVar = (StateSpec("host_call", (N,), torch.int64),)

    def of(self, host_call: HostCall) -> tuple[HostProcessor, ...]:
        return host_call.processors


class Watermark(_OnHost):
    """The request's ``watermarking_config``: after all other processors, as in transformers."""

    name = "watermark"
    options: ClassVar = (Option("watermarking_config", _watermark_problem),)
    state: ClassVar = ()
    reads: ClassVar = ("host_call",)

    def of(self, host_call: HostCall) -> tuple[HostProcessor, ...]:
        return host_call.watermark


def host_call(
    values: Mapping[str, Any], shown: torch.Tensor, prompt_length: int, num_logits: int, device: torch.device
) -> HostCall | None:
    """The host call of a request with these options, or None.

    Raises:
        InvalidOption: the watermark cannot be built.
    """
    if not any(name in values for name in CALLED_ON_HOST):
        return None
    config, watermark = values.get("watermarking_config"), None
    if config is not None:
        try:
            watermark = config.construct_processor(num_logits, device)
        except Exception as error:
            reason = f"transformers cannot build its processor: {error_line(error)}"
            raise InvalidOption(where="generate", name="watermarking_config", value=config, reason=reason) from error
    return HostCall(values.get("logits_processor", ()), watermark, shown, prompt_length, num_logits)

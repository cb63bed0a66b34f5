"""Registers processors from outside in the sampling pipeline."""

from __future__ import annotations

from typing import NoReturn

import torch

from speccompile.errors import InvalidOption
from speccompile.graph.state import StateSpec, core_state
from speccompile.sampling.base import IMPLEMENTATIONS, Option, Processor
from speccompile.sampling.pipeline import (
    OPTIONS,
    PENALTIES,
    PROCESSORS,
    REGISTERED,
    WARPERS,
    registered_processors,
    sampling_state,
)

#: Arguments of ``generate`` and ``submit`` that are not options of the sampling pipeline.
ARGUMENTS = frozenset(
    {
        *("ids", "input_ids", "inputs", "attention_mask", "generation_config", "max_new_tokens", "max_length"),
        *("eos_token_id", "pad_token_id", "bos_token_id", "num_return_sequences", "num_draft_tokens", "stop"),
        *(
            "stop_strings",
            "tokenizer",
            "stopping_criteria",
            "streamer",
            "max_time",
            "do_sample",
            "seed",
            "priority",
            "logprobs",
        ),
        *("prompt_logprobs", "top_logprobs", "record", "return_dict_in_generate", "output_scores", "output_logits"),
        *("output_attentions", "output_hidden_states", "options", "prediction", "adapter", "client", "self"),
    }
)


def register_processor(processor: Processor, *, after: str, replace: bool = False) -> None:
    """Add ``processor`` to the sampling pipeline of every model that is wrapped from now on.

    Its options are request options (``generate``, ``submit``), its state is in the arena of each slot, and every
    sampled step runs it. Requests that use it have drafts, and their text does not depend on the drafts.

    Args:
        after: the name of the penalty or warper after which it runs (``"repetition_penalty"``, ``"top_p"``), or of a
            processor that was registered before.
        replace: whether to replace a registered processor of the same name. Models that were wrapped with that one
            run this one from now on: wrap them again, or call ``spec.rebuild()``.

    Raises:
        InvalidOption: ``processor`` is not a processor, its name, an option or a state tensor exists already, or
            ``after`` is not a processor that others can follow.
    """

    def refuse(field: str, value: object, reason: str) -> NoReturn:
        raise InvalidOption(where="register_processor", name=field, value=value, reason=reason)

    if not isinstance(processor, Processor):
        refuse("processor", processor, "give an object of a class derived from speccompile.sampling.Processor")
    if problem := _form_problem(processor):
        refuse("processor", processor, problem)
    others = [item for item in registered_processors() if not (replace and item.name == processor.name)]
    if problem := _clash(processor, [*PROCESSORS, *others]):
        refuse("processor", processor, problem)
    places = [item.name for item in (*PENALTIES, *WARPERS, *others)]
    if after not in places:
        refuse("after", after, f"use one of {', '.join(places)}")
    for items in REGISTERED.values():
        for replaced in [item for item in items if item.name == processor.name]:
            items.remove(replaced)
            for option in replaced.options:
                del OPTIONS[option.name]
    processor.register()
    REGISTERED.setdefault(after, []).append(processor)
    OPTIONS.update({option.name: option for option in processor.options})


def _form_problem(processor: Processor) -> str | None:
    name, options, state = (getattr(processor, field, None) for field in ("name", "options", "state"))
    if not isinstance(name, str) or not name.isidentifier():
        return f"its name must be an identifier, got {name!r}"
    if not isinstance(options, tuple) or not all(isinstance(option, Option) for option in options):
        return f"its options must be a tuple of Option, got {options!r}"
    if not isinstance(state, tuple) or not state or not all(isinstance(spec, StateSpec) for spec in state):
        return (
            "its state must be a tuple of at least one StateSpec, which holds the options of a slot's request, got "
            f"{state!r}"
        )
    names = [item.name for item in (*options, *state)]
    if wrong := [item for item in names if not item.isidentifier()]:
        return f"the name of an option or a state tensor must be an identifier, got {wrong[0]!r}"
    for kind, items in (("options", options), ("state tensors", state)):
        if len({item.name for item in items}) < len(items):
            return f"two of its {kind} have the same name"
    if unknown := set(processor.reads) - {spec.name for spec in core_state(2)}:
        return f"reads names the core state {sorted(unknown)[0]!r}, which does not exist"
    return None


def _clash(processor: Processor, others: list[Processor]) -> str | None:
    if processor.name in [item.name for item in others]:
        return f"there is already a processor called {processor.name!r}; rename it"
    op = f"{processor.name}_"
    if op not in IMPLEMENTATIONS and hasattr(torch.ops.speccompile, op):
        return f"there is already an op called {op!r}; rename the processor"
    taken = {option.name for item in others for option in item.options}
    for option in processor.options:
        if option.name in taken | ARGUMENTS:
            return f"there is already a request option called {option.name!r}; rename the option"
    states = {spec.name for spec in [*core_state(2), *sampling_state(others)]}
    for spec in processor.state:
        if spec.name in states:
            return f"there is already a state tensor called {spec.name!r}; rename the tensor"
    return None

"""``generate`` over the engine, with padded tensors as input and output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import GenerationConfig, MaxTimeCriteria, StoppingCriteriaList, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile.adapters.loaded import Adapter
from speccompile.errors import InvalidInput, InvalidOption, OutputTruncated, QueueFull
from speccompile.multimodal.inputs import Features
from speccompile.multimodal.source import SourceEncoder
from speccompile.runtime.arguments import Settings, read_settings
from speccompile.runtime.criteria import Ends, criteria_of_row, first_of, replace_built_in_ends
from speccompile.runtime.engine import Engine
from speccompile.runtime.inputs import read_count, read_num_draft_tokens, read_prompts
from speccompile.runtime.listener import Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.outputs import as_output, read_outputs
from speccompile.runtime.params import Params
from speccompile.runtime.request import Request
from speccompile.runtime.request_options import GenerateOptions, seconds_or_none
from speccompile.runtime.score_records import ExtraOutputs
from speccompile.runtime.source_prompts import read_source_prompts
from speccompile.runtime.target import Target
from speccompile.sampling import OPTIONS
from speccompile.utils.numbers import is_int, python_numbers
from speccompile.utils.warn import warn_caller

#: New tokens of a row if neither the call nor a generation_config sets their number, as in transformers.
NEW_TOKENS = 20


def generate(
    engine: Engine,
    target: Target,
    input_ids: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    options: GenerateOptions,
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """Run :meth:`~speccompile.speculator.speculator.Speculator.generate`."""
    given, forced = options.config_fields(), 0
    names = frozenset() if target.encoder is None else target.encoder.names
    inputs = {name: value for name, value in options.others.items() if name in names}
    options = replace(options, others={name: options.others[name] for name in options.others.keys() - names})
    if isinstance(target.encoder, SourceEncoder):
        own = options.generation_config
        configs = [*([] if own is None else [own]), target.model.generation_config]
        found = read_source_prompts(target.encoder, configs, input_ids, attention_mask, {**options.others, **inputs})
        input_ids, attention_mask, inputs, forced = found.input_ids, found.attention_mask, found.inputs, found.forced
        options = replace(options, others=found.others)
    settings = read_settings(target.model, options.generation_config, {**given, **options.others})
    config = settings.config
    outputs = read_outputs(given, settings, engine.arena)
    num_draft_tokens = read_num_draft_tokens("generate", options.num_draft_tokens, engine.arena.layout)
    target.check(settings)
    eos = target.eos(given.get("eos_token_id"), settings)
    pad = _one_token("pad_token_id", config.pad_token_id)
    if isinstance(attention_mask, GenerationConfig):
        raise InvalidInput(name="attention_mask", reason="it is a GenerationConfig; give that as generation_config=...")
    input_ids = _prompt_or_bos(input_ids, attention_mask, config)
    copies = 1 if config.num_return_sequences is None else config.num_return_sequences
    copies = read_count(settings.source("num_return_sequences"), "num_return_sequences", copies)
    prompts, kept = read_prompts(input_ids, attention_mask, pad, eos, engine.arena.layout, copies)
    check_streamer(options.streamer)
    check_tokenizer(options.tokenizer)
    if options.streamer is not None and len(prompts) > 1:
        raise InvalidInput(name="streamer", reason="it can only follow one row; give one prompt, or no streamer")
    stopping = options.stopping_criteria
    given_criteria = stopping if isinstance(stopping, list | tuple) else [stopping]
    stop_strings = None if first_of(StopStringCriteria, given_criteria) else config.stop_strings
    criteria = make_criteria(stop_strings, options.tokenizer, stopping, "stop_strings")
    seconds = seconds_or_none(settings.source("max_time"), "max_time", config.max_time)
    if seconds is not None and first_of(MaxTimeCriteria, given_criteria) is None:
        criteria.append(MaxTimeCriteria(seconds))
    processors = {name: value for name, value in options.others.items() if name in OPTIONS}
    processors |= _min_new_tokens(processors, settings, input_ids.shape[1])
    sampling = target.sampling(
        "generate", processors, do_sample=given.get("do_sample"), seed=options.seed, eos=eos, settings=settings
    )
    new_tokens = target.new_tokens(
        "generate", given.get("max_new_tokens"), input_ids.shape[1] - forced, settings, default=NEW_TOKENS
    )
    if forced:
        _check_forced(outputs, options)
        if new_tokens <= forced or int(input_ids[0, -1]) in eos:
            return input_ids.repeat_interleave(copies, dim=0)
    new_tokens -= forced
    ends = replace_built_in_ends(given_criteria, Ends(new_tokens, tuple(eos)), sampling, input_ids.shape[1])
    params = Params(
        ends.new_tokens,
        ends.eos,
        sampling,
        patient=True,
        outputs=outputs or ExtraOutputs(),
        num_draft_tokens=num_draft_tokens,
    )
    features = [found for found in target.features(input_ids, kept, inputs) for _ in range(copies)]
    adapters = [found for found in _adapters(engine, options.adapter, len(prompts) // copies) for _ in range(copies)]
    input_ids = input_ids.repeat_interleave(copies, dim=0)
    requests = decode(
        engine,
        prompts,
        params,
        shown=input_ids,
        streamer=options.streamer,
        criteria=criteria,
        record=options.record,
        adapters=adapters,
        features=features,
    )
    sequences = padded(input_ids, requests, pad if pad is not None else eos[0] if eos else 0)
    return sequences if outputs is None else as_output(sequences, requests)


def _check_forced(outputs: ExtraOutputs | None, options: GenerateOptions) -> None:
    """Refuse what a first token that is forced, and thus not decoded, would be missing in.

    Raises:
        InvalidOption: a streamer or outputs beside the sequences are requested.
    """
    for name, given in (("return_dict_in_generate", outputs), ("streamer", options.streamer)):
        if given is not None:
            reason = "the first token is that of forced_bos_token_id, which no step chooses; give it at the end of "
            raise InvalidOption(where="generate", name=name, value=given, reason=f"{reason}decoder_input_ids instead")


def _adapters(engine: Engine, given: str | Sequence[str | None] | None, count: int) -> Sequence[Adapter | None]:
    """Return the adapter of each of ``count`` prompts."""
    if given is None or isinstance(given, str):
        return [engine.adapters.find("generate", given)] * count
    if not isinstance(given, Sequence) or len(given) != count:
        reason = f"give one name, or a list with a name or None for each of the {count} prompts"
        raise InvalidOption(where="generate", name="adapter", value=given, reason=reason)
    return [engine.adapters.find("generate", name) for name in given]


def _one_token(name: str, value: Any) -> int | None:
    value = python_numbers(value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value)
    if not (value is None or (is_int(value))):
        raise InvalidInput(name=name, reason=f"it must be one token id, got {value!r}")
    return value


def _prompt_or_bos(
    input_ids: torch.Tensor | None, attention_mask: torch.Tensor | None, config: GenerationConfig
) -> torch.Tensor:
    """Return the prompts. Without any, as in transformers, return one prompt that only has the BOS token."""
    if input_ids is not None:
        return input_ids
    bos = _one_token("bos_token_id", config.bos_token_id)
    if bos is None or attention_mask is not None:
        reason = "it is missing; give token ids [rows, tokens], or bos_token_id=... and no attention_mask"
        raise InvalidInput(name="input_ids", reason=reason)
    return torch.tensor([[bos]])


def _min_new_tokens(options: dict[str, Any], settings: Settings, width: int) -> dict[str, Any]:
    """Convert ``min_length`` to a number of new tokens: transformers counts padding as part of the prompt."""
    requested = options.get("min_length")
    least = python_numbers(settings.config.min_length if requested is None else requested)
    if not is_int(least) or least < 0:
        # No value, or one that the pipeline refuses.
        return {}
    new = options.get("min_new_tokens")
    new = settings.config.min_new_tokens if new is None else new
    return {"min_length": 0, "min_new_tokens": max(0, least - width) if new is None else new}


def decode(
    engine: Engine,
    prompts: list[list[int]],
    params: Params,
    *,
    shown: torch.Tensor | None = None,
    streamer: Streamer | None = None,
    criteria: StoppingCriteriaList | None = None,
    record: bool = False,
    adapters: Sequence[Adapter | None] | None = None,
    features: Sequence[Features | None] | None = None,
) -> list[Request]:
    """Decode all prompts to their end, together with the engine's other requests.

    The engine has at most ``2 * max_batch`` of them at a time, so a call with many prompts does not fill the queue for
    other callers.

    Args:
        shown: ``[B, P]``, the prompts as passed to streamers and criteria; None passes them without padding.
        streamer: receives the tokens of the only row as they arrive.
        criteria: criteria of all rows; each row has its own copies.
        record: save their hidden states, if the wrap saves hidden states.
        adapters: the adapter of each prompt; None means the adapter of ``params`` for all.
        features: the embeddings of the images of each prompt; None means no images.

    Raises:
        QueueFull: the queue is full for the first ``max_batch`` of them.
        InvalidOption: a processor or a criterion cannot be copied for each row.
        Exception: the error of one request; the others are cancelled.
    """
    rows = [torch.tensor([prompt]) for prompt in prompts] if shown is None else list(shown.split(1))
    criteria = StoppingCriteriaList() if criteria is None else criteria
    sampling, count = params.sampling, len(prompts)
    # Each row draws with its own seed, and has its own copies of processors and criteria that the host calls.
    own = [None if sampling is None else sampling.of_row(index, count) for index in range(count)]
    requests = [
        engine.submitter.create(
            engine,
            prompt,
            replace(
                params,
                sampling=own[index],
                record=engine.submitter.reserve_record("generate", record),
                adapter=params.adapter if adapters is None else adapters[index],
                features=None if features is None else features[index],
            ),
            row,
            streamer,
            criteria_of_row(criteria, index, count),
        )
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    try:
        queued = 0
        for index, request in enumerate(requests):
            while not request.finished:
                queued = _enqueue_more(engine, requests, index, queued)
                engine.wait(request, len(request.new_tokens))
            if request.error is not None:
                raise request.error
            if request.finish_reason == "cancelled":
                raise engine.loop.closed_error()
    finally:
        for request in requests:
            request.cancel()
        engine.stats.requests = [request.stats for request in requests]
    _warn_of_truncation(requests, engine.arena.layout.max_len)
    return requests


def _enqueue_more(engine: Engine, requests: list[Request], first: int, queued: int) -> int:
    """Queue as many of ``requests`` as fit, at least the one at ``first``, the oldest that has not finished.

    Args:
        queued: the number of requests that are queued already.

    Returns:
        The number of requests that are queued now.
    """
    slots = engine.arena.layout.max_batch
    alive = sum(not request.finished for request in requests[first:queued])
    while queued < len(requests) and alive < 2 * slots:
        group = requests[queued : queued + (1 if queued else slots)]
        try:
            # A Ctrl-C that arrives meanwhile is raised afterwards, when they are queued.
            engine.loop.enqueue(group)
        except QueueFull:
            if not queued:
                raise
            if queued > first:
                break
            # The queue is full of other callers' requests.
            engine.step()
            continue
        queued += len(group)
        alive += len(group)
    return queued


def _warn_of_truncation(requests: list[Request], max_len: int) -> None:
    truncated = [row for row, request in enumerate(requests) if request.stats.finish_reason == "max_len"]
    if truncated:
        warn_caller(
            f"rows {truncated} ended at max_len={max_len} before they had max_new_tokens; wrap with a larger max_len",
            OutputTruncated,
        )


def padded(input_ids: torch.Tensor, requests: list[Request], pad: int) -> torch.Tensor:
    """Return ``[B, P + new]`` as transformers does: the prompts as given, shorter rows padded at their end."""
    longest = max(len(request.new_tokens) for request in requests)
    rows = [request.new_tokens + [pad] * (longest - len(request.new_tokens)) for request in requests]
    new = torch.tensor(rows, dtype=torch.int64, device=input_ids.device)
    return torch.cat([input_ids.to(torch.int64), new], dim=1)

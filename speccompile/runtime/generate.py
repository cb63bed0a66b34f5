"""``generate`` over the engine: padded tensors in, padded tensors out."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase, StoppingCriteriaList
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile.errors import Closed, InvalidInput, OutputTruncated
from speccompile.plain import plain
from speccompile.runtime.engine import Engine
from speccompile.runtime.inputs import check_options, read_count, read_num_draft_tokens, read_prompts
from speccompile.runtime.listener import Streamer, check_streamer, check_tokenizer, make_criteria
from speccompile.runtime.outputs import as_output, read_outputs
from speccompile.runtime.records import Wanted, check_flag
from speccompile.runtime.request import Params, Request
from speccompile.runtime.target import EosTokens, Target


def generate(
    engine: Engine,
    target: Target,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    max_new_tokens: int | None,
    eos_token_id: EosTokens,
    pad_token_id: int | None,
    num_return_sequences: int,
    num_draft_tokens: int | None,
    stop_strings: str | Sequence[str] | None,
    tokenizer: PreTrainedTokenizerBase | None,
    stopping_criteria: Any,
    streamer: Streamer | None,
    do_sample: bool | None,
    seed: int | None,
    outputs: dict[str, Any],
    record: bool,
    options: dict[str, Any],
) -> torch.Tensor | GenerateDecoderOnlyOutput:
    """:meth:`~speccompile.speculator.Speculator.generate`, with what is to be returned as ``outputs``."""
    others = "input_ids, attention_mask, max_new_tokens, eos_token_id, pad_token_id, num_return_sequences, "
    check_options(
        "generate",
        options,
        f"{others}num_draft_tokens, stop_strings, tokenizer, stopping_criteria, streamer, do_sample, seed, "
        "return_dict_in_generate, output_scores, output_logits, record",
    )
    check_flag("generate", "record", record)
    wanted = read_outputs(outputs, target.model.generation_config, engine.arena)
    num_draft_tokens = read_num_draft_tokens("generate", num_draft_tokens, engine.arena.layout)
    target.check()
    eos = target.eos(eos_token_id)
    pad_token_id = plain(pad_token_id)
    if not (pad_token_id is None or isinstance(pad_token_id, int)):
        raise InvalidInput(name="pad_token_id", reason="it has to be one token id")
    pad = target.model.generation_config.pad_token_id if pad_token_id is None else pad_token_id
    copies = read_count("generate", "num_return_sequences", num_return_sequences)
    prompts = read_prompts(input_ids, attention_mask, pad, eos, engine.arena.layout, copies)
    check_streamer(streamer)
    check_tokenizer(tokenizer)
    if streamer is not None and len(prompts) > 1:
        raise InvalidInput(name="streamer", reason="it can follow one row, and there are more")
    criteria = make_criteria(stop_strings, tokenizer, stopping_criteria, "stop_strings")
    sampling = target.sampling("generate", options, do_sample=do_sample, seed=seed, eos=eos)
    params = Params(
        target.new_tokens("generate", max_new_tokens, input_ids.shape[1]),
        tuple(eos),
        sampling,
        patient=True,
        wanted=wanted or Wanted(),
        num_draft_tokens=num_draft_tokens,
    )
    input_ids = input_ids.repeat_interleave(copies, dim=0)
    requests = decode(engine, prompts, params, shown=input_ids, streamer=streamer, criteria=criteria, record=record)
    sequences = padded(input_ids, requests, pad if pad is not None else eos[0] if eos else 0)
    return sequences if wanted is None else as_output(sequences, requests)


def decode(
    engine: Engine,
    prompts: list[list[int]],
    params: Params,
    *,
    shown: torch.Tensor | None = None,
    streamer: Streamer | None = None,
    criteria: StoppingCriteriaList | None = None,
    record: bool = False,
) -> list[Request]:
    """Decode all prompts to their end, beside whatever else the engine runs.

    Args:
        shown: ``[B, P]``, the prompts as streamers and criteria see them; None shows them as they are.
        streamer: gets the tokens of the only row as they come.

        record: save their hidden states, where they are saved.

    Raises:
        Exception: what one of them ended with; the others are cancelled.
    """
    rows = [torch.tensor([prompt]) for prompt in prompts] if shown is None else list(shown.split(1))
    criteria = StoppingCriteriaList() if criteria is None else criteria
    sampling, count = params.sampling, len(prompts)
    # Each row draws with its own seed, and has its own copies of processors that the host calls.
    own = [None if sampling is None else sampling.of_row(index, count) for index in range(count)]
    requests = [
        engine.new_request(
            prompt,
            replace(params, sampling=own[index], record=engine.order_record("generate", record)),
            row,
            streamer,
            criteria,
        )
        for index, (prompt, row) in enumerate(zip(prompts, rows, strict=True))
    ]
    try:
        # A Ctrl-C that comes meanwhile is raised behind it, when they wait already.
        engine.enqueue(requests)
        for request in requests:
            while not request.finished:
                engine.wait(request, len(request.new_tokens))
            if request.error is not None:
                raise request.error
            if request.finish_reason == "cancelled":
                raise Closed()
    finally:
        for request in requests:
            request.cancel()
        engine.stats.requests = [request.stats for request in requests]
    _warn_of_truncation(requests, engine.arena.layout.max_len)
    return requests


def _warn_of_truncation(requests: list[Request], max_len: int) -> None:
    cut = [row for row, request in enumerate(requests) if request.stats.finish_reason == "max_len"]
    if cut:
        warnings.warn(
            f"rows {cut} ended at max_len={max_len} before they had max_new_tokens; wrap with a larger max_len",
            OutputTruncated,
            stacklevel=5,
        )


def padded(input_ids: torch.Tensor, requests: list[Request], pad: int) -> torch.Tensor:
    """``[B, P + new]`` as transformers returns it: the prompts as given, rows that ended earlier padded behind."""
    longest = max(len(request.new_tokens) for request in requests)
    rows = [request.new_tokens + [pad] * (longest - len(request.new_tokens)) for request in requests]
    new = torch.tensor(rows, dtype=torch.int64, device=input_ids.device)
    return torch.cat([input_ids.to(torch.int64), new], dim=1)

"""``generate`` over the engine: padded tensors in, padded tensors out."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from transformers import StoppingCriteriaList

from speccompile.errors import Closed, OutputTruncated
from speccompile.hidden_states.records import RecordOrder
from speccompile.runtime.engine import Engine
from speccompile.runtime.listener import Streamer
from speccompile.runtime.request import Params, Request


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
    requests = [
        engine.new_request(
            prompt, _params_of_row(params, index, engine.order_record("generate", record)), row, streamer, criteria
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


def _params_of_row(params: Params, index: int, record: RecordOrder | None) -> Params:
    """Each row draws with a seed of its own, and makes a record of its own."""
    sampling = params.sampling
    return replace(params, sampling=None if sampling is None else sampling.of_row(index), record=record)


def _warn_of_truncation(requests: list[Request], max_len: int) -> None:
    cut = [row for row, request in enumerate(requests) if request.stats.finish_reason == "max_len"]
    if cut:
        warnings.warn(
            f"rows {cut} ended at max_len={max_len} before they had max_new_tokens; wrap with a larger max_len",
            OutputTruncated,
            stacklevel=4,
        )


def padded(input_ids: torch.Tensor, requests: list[Request], pad: int) -> torch.Tensor:
    """``[B, P + new]`` as transformers returns it: the prompts as given, rows that ended earlier padded behind."""
    longest = max(len(request.new_tokens) for request in requests)
    rows = [request.new_tokens + [pad] * (longest - len(request.new_tokens)) for request in requests]
    new = torch.tensor(rows, dtype=torch.int64, device=input_ids.device)
    return torch.cat([input_ids.to(torch.int64), new], dim=1)

"""Outputs of ``generate`` beside the tokens, with transformers' names and shapes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from transformers.generation import GenerateDecoderOnlyOutput

from speccompile.errors import InvalidOption
from speccompile.graph.arena import Arena
from speccompile.runtime.arguments import Settings
from speccompile.runtime.request import Request
from speccompile.runtime.score_records import ExtraOutputs, check_kept

#: Options of transformers' ``generate``, in the order of its outputs. Attentions and hidden states never leave a step.
OUTPUTS = ("output_scores", "output_logits", "output_attentions", "output_hidden_states")


def read_outputs(given: dict[str, Any], settings: Settings, arena: Arena) -> ExtraOutputs | None:
    """Return the requested outputs beside the tokens. None means that only a tensor of the tokens is returned.

    Args:
        given: keywords, of which ``return_dict_in_generate`` and :data:`OUTPUTS` are read. None means the value of
            ``settings``, whose outputs are used only if a dict is returned, as in transformers.

    Raises:
        InvalidOption: an output is not available; the error has its name and the remedy.
    """
    outputs, config = {}, settings.config
    returns_dict = given.get("return_dict_in_generate")
    returns_dict = bool(config.return_dict_in_generate) if returns_dict is None else returns_dict
    for name in OUTPUTS:
        value, where = given.get(name), "generate"
        if value and not returns_dict:
            raise InvalidOption(where=where, name=name, value=value, reason="it needs return_dict_in_generate=True")
        if value is None and returns_dict:
            value, where = bool(getattr(config, name)), settings.source(name)
        if value and name in ("output_attentions", "output_hidden_states"):
            reason = f"a step keeps none; set {name}=False, or run the model itself over the sequence"
            raise InvalidOption(where=where, name=name, value=value, reason=reason)
        check_kept(where, name, bool(value), arena)
        outputs[name] = bool(value)
    return ExtraOutputs(logits=outputs["output_logits"], scores=outputs["output_scores"]) if returns_dict else None


def as_output(sequences: torch.Tensor, requests: Sequence[Request]) -> GenerateDecoderOnlyOutput:
    """Return transformers' output: ``sequences`` ``[B, P + new]``, and the requested outputs."""
    scores = [request.records.scores(len(request.new_tokens)) for request in requests]
    logits = [request.records.logits(len(request.new_tokens)) for request in requests]
    # transformers declares tuples with one tensor, and an old class for its ids.
    parts: dict[str, Any] = {
        "scores": _by_position(scores, sequences.device),
        "logits": _by_position(logits, sequences.device),
    }
    return GenerateDecoderOnlyOutput(sequences=cast(Any, sequences), **parts)


def _by_position(rows: Sequence[torch.Tensor | None], device: torch.device) -> tuple[torch.Tensor, ...] | None:
    """Convert rows of ``[n, V]`` to ``[B, V]`` for each position, with 0 after a row's end."""
    given = [row for row in rows if row is not None]
    if not given:
        return None
    by_position = torch.zeros(max(map(len, given)), len(given), given[0].shape[1], device=device)
    for index, row in enumerate(given):
        by_position[: len(row), index] = row
    return by_position.unbind(0)

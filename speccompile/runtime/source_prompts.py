"""Arguments of ``generate`` for encoder-decoders: the encoder's inputs, and the decoder's prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from speccompile.errors import InvalidInput
from speccompile.multimodal.source import SourceEncoder
from speccompile.utils.numbers import is_int, python_numbers

_IDS, _MASK = "decoder_input_ids", "decoder_attention_mask"
_START, _FIRST = "decoder_start_token_id", "forced_bos_token_id"


@dataclass(frozen=True)
class SourcePrompts:
    """The arguments of a call, for each part of the model.

    Args:
        input_ids: int64 ``[B, P]``, the decoder's prompts, with the forced first tokens.
        attention_mask: ``[B, P]``, 0 at padding.
        inputs: those of the encoder.
        others: the other options of the call.
        forced: the number of new tokens that ``input_ids`` already has.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    inputs: dict[str, Any]
    others: dict[str, Any]
    forced: int


def read_source_prompts(
    encoder: SourceEncoder,
    configs: Sequence[GenerationConfig],
    given: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> SourcePrompts:
    """Separate the inputs of the encoder from the decoder's prompts. As in transformers, a prompt begins with
    ``decoder_start_token_id``, which is put before given ``decoder_input_ids`` without it.

    Args:
        configs: have the settings that the call does not give; the first one that has a value counts.
        given: the encoder's main input, by position.

    Raises:
        InvalidInput: a prompt is not valid, or has no token to begin with.
    """
    others = dict(options)
    inputs = {name: others.pop(name) for name in encoder.names if name in others}
    if given is not None:
        if inputs.get(encoder.main) is not None:
            raise InvalidInput(name=encoder.main, reason="it is given twice, by position and by name; give it once")
        inputs[encoder.main] = given
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    ids, mask = others.pop(_IDS, None), others.pop(_MASK, None)
    _check_prompts(ids, mask)
    first = _one_token(_FIRST, _setting(_FIRST, others, configs))
    start = _setting(_START, others, configs)
    start = _setting("bos_token_id", {}, configs) if start is None else start
    sources = inputs.get(encoder.main, inputs.get("encoder_outputs"))
    rows = len(sources) if isinstance(sources, torch.Tensor) else len(sources[0]) if sources else 1
    begins = _begins(start, rows if ids is None else len(ids))
    if ids is None:
        if begins is None:
            reason = "it is missing, and neither the call nor a generation_config has a decoder_start_token_id"
            raise InvalidInput(name=_IDS, reason=reason)
        ids = begins[:, None]
    elif encoder.main == "input_ids" and begins is not None and ids[:, 0].ne(begins).all():
        ids = torch.cat([begins[:, None].to(ids), ids], dim=1)
        mask = None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
    if mask is None:
        mask = torch.ones_like(ids)
    forced = int(first is not None and ids.shape[1] == 1)
    if first is not None and forced:
        ids = torch.cat([ids, torch.full_like(ids, first)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask)], dim=1)
    return SourcePrompts(ids, mask, inputs, others, forced)


def _setting(name: str, options: dict[str, Any], configs: Sequence[GenerationConfig]) -> Any:
    """Remove an option from ``options`` and return it; the first value of a config if it is not there."""
    if name in options:
        return options.pop(name)
    return next((value for config in configs if (value := getattr(config, name, None)) is not None), None)


def _check_prompts(ids: Any, mask: Any) -> None:
    if ids is not None and not (isinstance(ids, torch.Tensor) and ids.ndim == 2 and ids.numel()):
        raise InvalidInput(name=_IDS, reason="it must be a tensor [rows, tokens] with at least one token")
    if mask is not None and not (isinstance(mask, torch.Tensor) and ids is not None and mask.shape == ids.shape):
        raise InvalidInput(name=_MASK, reason=f"it must be a tensor of the shape of {_IDS}")


def _one_token(name: str, value: Any) -> int | None:
    values = python_numbers(value.tolist() if isinstance(value, torch.Tensor) else value)
    values = values if isinstance(values, list | tuple) else [values]
    if len(values) != 1 or not (values[0] is None or is_int(values[0])):
        raise InvalidInput(name=name, reason=f"it must be one token id, got {value!r}")
    return values[0]


def _begins(start: Any, rows: int) -> torch.Tensor | None:
    """The token that each of ``rows`` prompts begins with, ``[B]``; None without one."""
    values = python_numbers(start.tolist() if isinstance(start, torch.Tensor) else start)
    if values is None:
        return None
    values = [values] * rows if is_int(values) else [*values] if isinstance(values, list | tuple) else []
    if len(values) != rows or not all(map(is_int, values)):
        raise InvalidInput(name=_START, reason=f"it must be a token id, or one for each of {rows} rows, got {start!r}")
    return torch.tensor(values)

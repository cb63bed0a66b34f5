"""Arguments of ``generate`` for encoder-decoders: the encoder's inputs, and the decoder's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from speccompile.errors import InvalidInput
from speccompile.multimodal.source import SourceEncoder

_IDS, _MASK, _FIRST = "decoder_input_ids", "decoder_attention_mask", "forced_bos_token_id"


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
    config: GenerationConfig,
    given: torch.Tensor | None,
    attention_mask: torch.Tensor | None,
    options: Mapping[str, Any],
) -> SourcePrompts:
    """Separate the inputs of the encoder from the decoder's prompts. As in transformers, a prompt begins with
    ``decoder_start_token_id``, which is put before given ``decoder_input_ids`` without it.

    Args:
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
    ids, mask, first = (others.pop(name, None) for name in (_IDS, _MASK, _FIRST))
    start = config.decoder_start_token_id
    start = config.bos_token_id if start is None else start
    if ids is None:
        if not isinstance(start, int):
            reason = "it is missing, and the generation_config has no decoder_start_token_id"
            raise InvalidInput(name=_IDS, reason=reason)
        sources = inputs.get(encoder.main, inputs.get("encoder_outputs"))
        rows = len(sources) if isinstance(sources, torch.Tensor) else 1 if sources is None else len(sources[0])
        ids = torch.full((rows, 1), start)
    elif not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise InvalidInput(name=_IDS, reason="it must be a tensor [rows, tokens]")
    elif encoder.main == "input_ids" and isinstance(start, int) and ids[:, 0].ne(start).all():
        ids = torch.cat([torch.full_like(ids[:, :1], start), ids], dim=1)
        mask = None if mask is None else torch.cat([torch.ones_like(mask[:, :1]), mask], dim=1)
    if mask is None:
        mask = torch.ones_like(ids)
    forced = int(first is not None and ids.shape[1] == 1)
    if forced:
        ids = torch.cat([ids, torch.full_like(ids, first)], dim=1)
        mask = torch.cat([mask, torch.ones_like(mask)], dim=1)
    return SourcePrompts(ids, mask, inputs, others, forced)

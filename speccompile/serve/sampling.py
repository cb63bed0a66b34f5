"""Arguments of ``Engine.submit`` from the fields of a request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import GenerationConfig

from speccompile.graph.state import EOS_CAPACITY
from speccompile.serve.api_error import ApiError
from speccompile.serve.fields import GenerationFields

#: Number of the engine's seeds. Those of the API may be negative.
_SEEDS = 2**63
#: Options of the sampling pipeline that have the same name as their field.
_SAME_NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
#: Values if neither the request nor the model's generation_config sets one, as in vLLM. transformers would keep only
#: the 50 likeliest tokens.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "typical_p": 1.0}
#: Temperatures below this value are greedy, as in vLLM.
_LEAST_TEMPERATURE = 1e-5


def sampling_arguments(body: GenerationFields, config: GenerationConfig) -> dict[str, Any]:
    """Arguments for the choice of tokens. ``config``, the model's own, has the values of fields that are left out."""
    arguments = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    drawing: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        given, own = getattr(body, name), getattr(config, name)
        drawing[name] = given if given is not None else own if own is not None else default
    # In vLLM, -1 keeps all tokens.
    drawing["top_k"] = max(drawing["top_k"], 0)
    # A mass of 0 keeps only the likeliest token.
    if drawing["temperature"] < _LEAST_TEMPERATURE or drawing["top_k"] == 1 or drawing["top_p"] == 0:
        arguments["do_sample"] = False
    else:
        arguments |= drawing | {"do_sample": True}
    if body.min_tokens:
        arguments["min_new_tokens"] = body.min_tokens
    return arguments


def eos_arguments(
    ends: Sequence[int], config: GenerationConfig, vocab_size: int, *, ignore_eos: bool
) -> dict[str, Any]:
    """Argument for the tokens that end a text: the model's own, unless they are ignored, and ``ends``. Empty if these
    are only the model's own.

    Raises:
        ApiError: there are too many tokens, or they are not token ids.
    """
    if not ends:
        return {"eos_token_id": []} if ignore_eos else {}
    own = config.eos_token_id if isinstance(config.eos_token_id, list) else [config.eos_token_id]
    kept = [] if ignore_eos else [token for token in own if token is not None and 0 <= token < vocab_size]
    for index, token in enumerate(ends):
        if not 0 <= token < vocab_size:
            param = f"stop_token_ids[{index}]"
            raise ApiError(f"{param}: token ids are 0 .. {vocab_size - 1}, got {token}", param=param)
    tokens = list(dict.fromkeys([*kept, *ends]))
    if len(tokens) > EOS_CAPACITY:
        message = f"stop_token_ids: at most {EOS_CAPACITY} tokens end a text, {len(kept)} of the model among them"
        raise ApiError(message, param="stop_token_ids")
    return {"eos_token_id": tokens}


def seed_of(body: GenerationFields, index: int) -> int | None:
    """Seed of the choice ``index``. Choices of a request differ, and the first one equals that of ``n=1``."""
    return None if body.seed is None else (body.seed + index) % _SEEDS

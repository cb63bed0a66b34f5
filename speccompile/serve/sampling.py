"""The arguments of ``Engine.submit`` for the fields of a request."""

from __future__ import annotations

from typing import Any

from transformers import GenerationConfig

from speccompile.serve.fields import Generation

#: Seeds of the engine; those of the API may be negative.
_SEEDS = 2**63
#: Options of the sampling pipeline that have the name of their field.
_SAME_NAMES = ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias")
#: What holds where neither the request nor the model's generation_config says anything, as in vLLM. transformers itself
#: would keep the 50 likeliest tokens.
_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def sampling_arguments(body: Generation, config: GenerationConfig) -> dict[str, Any]:
    """How tokens are chosen. ``config`` is the model's own, whose values hold for fields that are left out."""
    arguments = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    drawing: dict[str, Any] = {}
    for name, default in _DEFAULTS.items():
        given, own = getattr(body, name), getattr(config, name)
        drawing[name] = given if given is not None else own if own is not None else default
    # vLLM has -1 for all tokens.
    drawing["top_k"] = max(drawing["top_k"], 0)
    if drawing["temperature"] == 0 or drawing["top_k"] == 1:
        arguments["do_sample"] = False
    else:
        arguments |= drawing | {"do_sample": True}
    if body.min_tokens:
        arguments["min_new_tokens"] = body.min_tokens
    if body.ignore_eos:
        arguments["eos_token_id"] = []
    return arguments


def seed_of(body: Generation, index: int) -> int | None:
    """Of the choice ``index``: choices of one request draw different tokens, the first one as with ``n=1``."""
    return None if body.seed is None else (body.seed + index) % _SEEDS

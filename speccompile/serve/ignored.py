"""Fields that clients send by default and that have no effect here. They would not change an answer."""

from __future__ import annotations

import functools
import logging

log = logging.getLogger("speccompile.serve")

_STATELESS = "the server stores nothing"
_CACHE = "prompts with a known beginning reuse its KV without it"
_TEMPLATE = "it is a variable of chat templates"

#: Reason why a field has no effect, by name. An endpoint that defines a field of that name applies it.
IGNORED: dict[str, str] = {
    "metadata": _STATELESS,
    "prompt_cache_key": _CACHE,
    "prompt_cache_options": _CACHE,
    "prompt_cache_retention": _CACHE,
    "reasoning": _TEMPLATE,
    "reasoning_effort": _TEMPLATE,
    "request_id": "the header x-request-id names a request",
    "service_tier": "there is one tier of service",
    "session_id": _STATELESS,
    "store": _STATELESS,
    "verbosity": _TEMPLATE,
}


@functools.cache
def log_ignored(field: str, reason: str) -> None:
    """Log once that ``field`` has no effect. Both arguments must be from a fixed list, since every pair is stored."""
    log.warning("%s is ignored, since %s", field, reason)

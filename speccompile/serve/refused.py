"""Fields of the OpenAI API that the server knows and cannot follow. A value that asks for nothing passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from speccompile.serve.api_error import ApiError

_TEXT_ONLY = "the model reads and writes text alone"
_STATELESS = "the server stores nothing"
_TOOLS = "it is the API before tools; use tools and tool_choice"
_ONLY_CHATS = "only chats call tools; use /v1/chat/completions"
_CACHE = "prompts with a known beginning reuse its KV by themselves"

#: By field: values that ask for nothing, besides null, and why others are refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), "there are no such programs"),
    "audio": ((), _TEXT_ONLY),
    "background": ((False,), "a response is of one connection"),
    "background_options": ((), "a response is of one connection"),
    "best_of": ((1,), "only the choices that are returned are generated; use n"),
    "context_management": (([],), "no prompt is cut"),
    "conversation": ((), f"{_STATELESS}; send the whole conversation as input"),
    "function_call": ((), _TOOLS),
    "functions": (([],), _TOOLS),
    "image": ((), _TEXT_ONLY),
    "include": (([],), "there is nothing to include"),
    "max_tool_calls": ((), _ONLY_CHATS),
    "metadata": (({},), _STATELESS),
    "modalities": ((["text"],), _TEXT_ONLY),
    "moderation": ((), "the server judges no texts"),
    "parallel_tool_calls": ((True, False), _ONLY_CHATS),
    "previous_response_id": ((), f"{_STATELESS}; send the whole conversation as input"),
    "prompt": ((), f"{_STATELESS}, prompts neither"),
    "prompt_cache_key": ((), _CACHE),
    "prompt_cache_options": ((), _CACHE),
    "prompt_cache_retention": ((), _CACHE),
    "reasoning": (({},), "the model has no levels of effort"),
    "reasoning_effort": ((), "the model has no levels of effort"),
    "safety_identifier": ((), f"{_STATELESS}; use user, which is logged"),
    "service_tier": (("auto", "default"), "there is one tier of service"),
    "store": ((False,), _STATELESS),
    "suffix": (("",), "the model writes from left to right"),
    "tool_choice": (("auto", "none"), _ONLY_CHATS),
    "tools": (([],), _ONLY_CHATS),
    "top_logprobs": ((0,), "only chats have it"),
    "truncation": (("disabled",), "no prompt is cut"),
    "verbosity": (("medium",), "the model has no levels of verbosity"),
    "web_search_options": ((), "the server searches nothing"),
}


def check_refused(body: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """``body`` without refused fields, and without fields that are null.

    Raises:
        ApiError: a refused field asks for something.
    """
    kept = {}
    for name, value in body.items():
        if name in REFUSED and name not in kind.model_fields:
            neutral, reason = REFUSED[name]
            if value is not None and not any(type(value) is type(item) and value == item for item in neutral):
                raise ApiError(f"{name}: not supported, since {reason}", param=name, code="unsupported_field")
        elif value is not None:
            kept[name] = value
    return kept

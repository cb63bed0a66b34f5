"""Fields that the server knows and an endpoint does not support: fields of the OpenAI API and of vLLM, and fields of
other endpoints. A value that would have no effect is accepted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from speccompile.serve.api_error import ApiError
from speccompile.serve.base_fields import Fields
from speccompile.serve.fields import ChatBody, CompletionBody
from speccompile.serve.ignored import IGNORED, log_ignored
from speccompile.serve.responses_fields import ResponsesBody

_TEXT_ONLY = "the model reads and writes only text"
_STATELESS = "the server stores nothing"
_TOOLS = "it is the API before tools; use tools and tool_choice"
_ONLY_CHATS = "a completion calls no tools; use /v1/chat/completions"
_BEAMS = "beams are not searched"
_TOKENS = "tokens are returned as texts; use logprobs or return_token_sources"

#: Endpoints whose fields are named in errors of other endpoints.
_ENDPOINTS: dict[str, type[Fields]] = {
    "/v1/completions": CompletionBody,
    "/v1/chat/completions": ChatBody,
    "/v1/responses": ResponsesBody,
}

#: By field: values without an effect, in addition to null, and the reason why other values are refused.
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), "there are no such programs"),
    "add_special_tokens": ((False,), "the chat template writes them"),
    "allowed_token_ids": (([],), "use logit_bias, or structured_outputs with choice"),
    "audio": ((), _TEXT_ONLY),
    "background": ((False,), "a response is of one connection"),
    "background_options": ((), "a response is of one connection"),
    "bad_words": (([],), "use logit_bias"),
    "best_of": ((1,), "only the choices that are returned are generated; leave it out, or give it the value of n"),
    "cache_salt": ((), "KV is shared by all clients; start a server for each"),
    "chat_template": ((), "the template is the model's own"),
    "context_management": (([],), "no prompt is cut"),
    "conversation": ((), f"{_STATELESS}; send the whole conversation as input"),
    "documents": (([],), "use chat_template_kwargs with documents, if the template has them"),
    "early_stopping": ((False,), _BEAMS),
    "function_call": (("none", "auto"), _TOOLS),
    "functions": (([],), _TOOLS),
    "image": ((), _TEXT_ONLY),
    "include_reasoning": ((True,), "an answer has its reasoning, if the model writes one"),
    "include_stop_str_in_output": ((False,), "a text ends before its stop string"),
    "length_penalty": ((0, 1), _BEAMS),
    "logits_processors": (([],), "the server runs no code of its clients"),
    "max_tokens": ((), "the field of a response is max_output_tokens"),
    "modalities": ((["text"],), _TEXT_ONLY),
    "moderation": ((), "the server judges no texts"),
    "parallel_tool_calls": ((True, False), _ONLY_CHATS),
    "previous_response_id": ((), f"{_STATELESS}; send the whole conversation as input"),
    "prompt": ((), f"{_STATELESS}, prompts neither"),
    "prompt_logprobs": ((0,), "use echo and logprobs of /v1/completions"),
    "return_token_ids": ((False,), _TOKENS),
    "return_tokens_as_token_ids": ((False,), _TOKENS),
    "spaces_between_special_tokens": ((True,), "texts are those of the tokenizer"),
    "thinking_token_budget": ((-1,), "a reasoning has no limit but max_tokens"),
    "tool_choice": (("auto", "none"), _ONLY_CHATS),
    "use_beam_search": ((False,), _BEAMS),
    "web_search_options": ((), "the server searches nothing"),
}

#: By field and endpoint: the endpoint's own field for the same thing.
INSTEAD: dict[tuple[str, type[BaseModel]], str] = {
    ("response_format", ResponsesBody): "text.format",
    ("max_output_tokens", ChatBody): "max_tokens",
    ("max_output_tokens", CompletionBody): "max_tokens",
    ("messages", CompletionBody): "prompt",
    ("messages", ResponsesBody): "input",
    ("input", ChatBody): "messages",
    ("input", CompletionBody): "prompt",
    ("instructions", ChatBody): "a message with the role system",
}


def check_refused(body: Mapping[str, Any], kind: type[BaseModel]) -> dict[str, Any]:
    """Remove fields of ``body`` that are ignored, null, or refused but without effect.

    Raises:
        ApiError: a field that the endpoint of ``kind`` does not support would have an effect.
    """
    kept = {}
    for name, value in body.items():
        if value is None:
            continue
        if name in kind.model_fields:
            kept[name] = value
        elif name in IGNORED:
            log_ignored(name, IGNORED[name])
        elif name in REFUSED:
            neutral, reason = REFUSED[name]
            if name == "best_of":
                neutral = (*neutral, body.get("n"))
            if not any(_is_same(value, item) for item in neutral):
                raise _error(name, f"not supported, since {reason}")
        elif paths := [path for path, other in _ENDPOINTS.items() if name in other.model_fields]:
            defaults = [_ENDPOINTS[path].model_fields[name].get_default(call_default_factory=True) for path in paths]
            if not any(_is_same(value, default) for default in defaults):
                meant = f"; use {instead}" if (instead := INSTEAD.get((name, kind))) else ""
                raise _error(name, f"it is a field of {' and '.join(paths)}, not of this endpoint{meant}")
        else:
            kept[name] = value
    return kept


def _is_same(value: Any, other: Any) -> bool:
    """Return whether two JSON values are equal: 1 equals 1.0, but not true."""
    return bool(value == other) and isinstance(value, bool) is isinstance(other, bool)


def _error(name: str, reason: str) -> ApiError:
    return ApiError(f"{name}: {reason}", param=name, code="unsupported_field")

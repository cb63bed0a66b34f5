"""Detects how a tokenizer's chat template writes tools, calls and results, by rendering small conversations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.tool_grammar import DEFAULT_SYNTAX, CallSyntax, syntax_of
from speccompile.utils.mistral_common import is_mistral_common

#: Names that no template contains.
_TOOL, _CALL, _RESULT, _SYSTEM = "tool7Qx4", "call7Qx4", "result7Qx4", "system7Qx4"
_USER = {"role": "user", "content": "a"}
_TOOLS = [{"type": "function", "function": {"name": _TOOL, "description": "a", "parameters": {"type": "object"}}}]
#: Some templates require ids of nine characters.
_ID = "abcdefghi"
_CALLING = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": _ID, "type": "function", "function": {"name": _CALL, "arguments": {"a": 1}}}],
}
_ANSWERING = {"role": "tool", "tool_call_id": _ID, "name": "a", "content": _RESULT}


@dataclass(frozen=True)
class WrittenCalls:
    """Whether a template writes calls of assistants, and whether it writes their results."""

    calls: bool
    results: bool


def writes_tools(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template writes the request's tools into the prompt.

    Raises:
        ApiError: the tokenizer is mistral-common's, which writes them without a template.
    """
    if is_mistral_common(tokenizer):
        reason = "the format of mistral-common's calls is not known here; serve a checkpoint with tokenizer.json"
        raise ApiError(f"tools: {reason}", param="tools")
    return _TOOL in _rendered(tokenizer, [_USER], _TOOLS)


def writes_system(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the template writes system messages."""
    return _SYSTEM in _rendered(tokenizer, [{"role": "system", "content": _SYSTEM}, _USER])


def written_calls(tokenizer: PreTrainedTokenizerBase, *, tools: bool) -> WrittenCalls:
    """Return whether the template writes calls and results.

    Args:
        tools: whether the request has tools. Some tokenizers have a separate template for these.
    """
    text = _rendered(tokenizer, [_USER, _CALLING, _ANSWERING], _TOOLS if tools else None)
    # A template without calls may accept any role, but its model was not trained on results.
    return WrittenCalls(_CALL in text, _CALL in text and _RESULT in text)


def call_syntax(tokenizer: PreTrainedTokenizerBase) -> CallSyntax:
    """Syntax of calls: that of the template, or the default one if the template does not write tools."""
    template: Any = tokenizer.chat_template
    if not writes_tools(tokenizer):
        return DEFAULT_SYNTAX
    # Some tokenizers have several templates, by name.
    return syntax_of(template if isinstance(template, str) else "".join(template.values()))


def _rendered(
    tokenizer: PreTrainedTokenizerBase,
    conversation: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None = None,
) -> str:
    """Render a conversation; empty if the template refuses it or fails, as it would in a request."""
    try:
        return str(tokenizer.apply_chat_template(conversation, tools=tools, tokenize=False))  # type: ignore[arg-type]
    except Exception:
        # A template is a program of the model, and mistral-common checks messages with its own errors: any class can be
        # raised. The request's own rendering (prompts.py) reports the failure.
        return ""

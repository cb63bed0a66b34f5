"""Token ids of prompts and conversations."""

from __future__ import annotations

import inspect
import json
import logging
import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.fields import Message
from speccompile.serve.ignored import log_ignored
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import Tool

log = logging.getLogger("speccompile.serve")

#: Arguments of the call that renders a template: they are no variables of a template.
_ARGUMENTS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents", "kwargs"}


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Of a text; with ``special`` what the tokenizer puts around texts (a BOS token) is there too."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    given: TemplateFields,
) -> list[int]:
    """Of a conversation, by the tokenizer's chat template.

    Args:
        given: what the request gives to the template beside messages and tools.

    Raises:
        ApiError: there is no template, or it refuses the conversation.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        message = "messages: the model's tokenizer has no chat template; use /v1/completions"
        raise ApiError(message, param="messages")
    variables = _variables(given)
    conversation = [_for_template(message) for message in messages]
    schemas = None if not tools else [tool.model_dump(exclude_none=True) for tool in tools]
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation,
            tools=schemas,  # type: ignore[arg-type]
            add_generation_prompt=given.opens_answer,
            continue_final_message=given.continue_final_message,
            return_dict=True,
            **variables,
        )
    except TemplateError as error:
        # Templates raise it themselves, for roles that do not alternate and the like.
        message = f"messages: the chat template refuses them: {error.message or type(error).__name__}"
        raise ApiError(message, param="messages") from None
    except Exception as error:
        # A template is the model's own program, and may fail on what it does not expect.
        log.exception("the chat template failed")
        message = f"messages: the chat template fails on them ({type(error).__name__})"
        raise ApiError(message, param="messages") from None
    _log_unused(tokenizer.get_chat_template(tools=schemas), given)
    return list(encoded["input_ids"])


def _variables(given: TemplateFields) -> dict[str, Any]:
    """Of the template, by name.

    Raises:
        ApiError: one has the name of an argument of the call.
    """
    variables = {name: value for _, named in given.template_variables() for name, value in named.items()}
    for name in variables.keys() & {*_ARGUMENTS, "messages"}:
        param = f"chat_template_kwargs.{name}"
        raise ApiError(f"{param}: it is not a variable of a template", param=param, code="invalid_value")
    return variables


def _log_unused(template: str, given: TemplateFields) -> None:
    """Log the fields of whose variables ``template`` has none."""
    for field, named in given.template_variables():
        if not any(re.search(rf"\b{re.escape(name)}\b", template) for name in named):
            log_ignored(field, "the chat template has no such variable")


def _for_template(message: Message) -> dict[str, Any]:
    """As templates expect it: arguments of calls are objects, content is a text."""
    shown = message.model_dump(exclude_none=True)
    # Templates know the older name.
    shown["role"] = "system" if message.role == "developer" else message.role
    shown.setdefault("content", "")
    for call in shown.get("tool_calls", ()):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return shown

"""Token ids of prompts and conversations."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.conversation import conversation_of
from speccompile.serve.message_fields import Message
from speccompile.serve.tool_fields import Tool

log = logging.getLogger("speccompile.serve")


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Of a text; with ``special`` what the tokenizer puts around texts (a BOS token) is there too."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    *,
    generation_prompt: bool,
) -> list[int]:
    """Of a conversation, by the tokenizer's chat template. What it does not write of tools is text of the messages.

    Raises:
        ApiError: there is no template, or it refuses the conversation.
    """
    if getattr(tokenizer, "chat_template", None) is None:
        message = "messages: the model's tokenizer has no chat template; use /v1/completions"
        raise ApiError(message, param="messages")
    conversation, schemas = conversation_of(tokenizer, messages, tools)
    try:
        encoded: Any = tokenizer.apply_chat_template(
            conversation,
            tools=schemas,  # type: ignore[arg-type]
            add_generation_prompt=generation_prompt,
            return_dict=True,
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
    return list(encoded["input_ids"])

"""Token ids of prompts and conversations."""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from speccompile.runtime.detokenizer import Detokenizer
from speccompile.serve.api_error import ApiError
from speccompile.serve.conversation import conversation_of, in_parts
from speccompile.serve.ignored import log_ignored
from speccompile.serve.image_parts import ImageReader
from speccompile.serve.logprobs import TextOffsets
from speccompile.serve.message_fields import Message
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import Tool
from speccompile.serve.vocabulary import Vocabulary
from speccompile.utils.mistral_common import is_mistral_common, writes_chats

log = logging.getLogger("speccompile.serve")

#: Arguments of the call that renders a template. They cannot be variables of a template.
_ARGUMENTS = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters.keys() - {"documents", "kwargs"}


def text_ids(tokenizer: PreTrainedTokenizerBase, text: str, *, special: bool) -> list[int]:
    """Token ids of a text. With ``special``, tokens that the tokenizer adds to texts (such as BOS) are included."""
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


@dataclass(frozen=True)
class Echo:
    """A prompt that a completion repeats, and its tokens in that text.

    Args:
        offsets: number of characters before each token.
        tokens: the text of each token.
    """

    text: str
    offsets: list[int]
    tokens: list[str]


def echo_of(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: Vocabulary,
    prompt: str | list[int],
    ids: list[int],
    *,
    special: bool,
) -> Echo:
    """Echo of ``prompt``, whose token ids are ``ids``. A text is repeated as it was sent. Tokens that the tokenizer
    adds to a text, and a BOS token before ids, are left out. ``special``: see :func:`text_ids`."""
    if isinstance(prompt, str):
        own = text_ids(tokenizer, prompt, special=False) if special else ids
        starts = range(len(ids) - len(own) + 1)
        first = next((start for start in starts if ids[start : start + len(own)] == own), 0)
        text, end = prompt, first + len(own)
    else:
        first, end = int(ids[0] == tokenizer.bos_token_id), len(ids)
        text = str(tokenizer.decode(ids[first:]))
    counted = TextOffsets(vocabulary, Detokenizer(tokenizer, skip_special_tokens=False), 0)
    inside = counted.add(ids[first:end])
    tokens = [vocabulary.text_of(token) for token in ids]
    begin = next((index for index in range(first, end) if tokens[index]), end)
    # SentencePiece's decoder strips the first space of a text, also where the text that was sent has one.
    stripped = max(0, len(text) - counted.length)
    inside = [offset + stripped * (first + index > begin) for index, offset in enumerate(inside)]
    offsets = [0] * first + inside + [len(text)] * (len(ids) - end)
    if begin < end and not text.startswith(tokens[begin]):
        # Its encoder puts a space before a text that has none.
        tokens[begin] = tokens[begin].removeprefix(" ")
    # A tokenizer that normalises a text may return more characters than the text has.
    return Echo(text, [min(offset, len(text)) for offset in offsets], tokens)


@dataclass(frozen=True)
class ChatPrompt:
    """Token ids of a conversation, and what its images are for the model's forward, by name."""

    ids: list[int]
    inputs: dict[str, Any]


def chat_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    given: TemplateFields,
) -> list[int]:
    """Token ids of a conversation without images. Arguments and errors are those of :func:`chat_prompt`."""
    return chat_prompt(tokenizer, None, messages, tools, given).ids


def chat_prompt(
    tokenizer: PreTrainedTokenizerBase,
    images: ImageReader | None,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    given: TemplateFields,
) -> ChatPrompt:
    """Token ids of a conversation, by the tokenizer's chat template, or with images by the processor's. Tools that it
    does not write become text of messages.

    Args:
        images: reads images of messages, for a model that has them.
        given: variables of the request for the template, in addition to messages and tools.

    Raises:
        ApiError: there is no chat template, it refuses the conversation, or an image cannot be read.
    """
    with_images = any(message.parts for message in messages)
    if with_images and (images is None or images.processor.chat_template is None):
        raise ApiError("messages: there are images, and the served model reads only text", param="messages")
    if not writes_chats(tokenizer):
        message = "messages: the model's tokenizer has no chat template; use /v1/completions"
        raise ApiError(message, param="messages")
    variables = _variables(given)
    conversation, schemas = conversation_of(tokenizer, messages, tools, images)
    try:
        arguments: dict[str, Any] = {
            "tools": schemas,
            "add_generation_prompt": given.opens_answer,
            "continue_final_message": given.continue_final_message,
            "return_dict": True,
            **variables,
        }
        encoded: Any
        if with_images:
            assert images is not None
            conversation = [message | {"content": in_parts(message["content"])} for message in conversation]
            encoded = images.processor.apply_chat_template(
                conversation, tokenize=True, return_tensors="pt", **arguments
            )
        else:
            encoded = tokenizer.apply_chat_template(conversation, **arguments)
    except TemplateError as error:
        # Templates raise this error themselves, for example if roles do not alternate.
        message = f"messages: the chat template refuses them: {error.message or type(error).__name__}"
        raise ApiError(message, param="messages") from None
    except Exception as error:
        if is_mistral_common(tokenizer):
            # mistral-common checks roles, fields and names of calls.
            message = f"messages: the model's tokenizer refuses them: {str(error)[:200]}"
            raise ApiError(message, param="messages") from None
        # A template is a program of the model, and may fail on unexpected input.
        log.exception("the chat template failed")
        message = f"messages: the chat template fails on them ({type(error).__name__})"
        raise ApiError(message, param="messages") from None
    template = "" if is_mistral_common(tokenizer) else tokenizer.get_chat_template(tools=schemas)
    _log_unused(template, given)
    if not with_images:
        return ChatPrompt(list(encoded["input_ids"]), {})
    inputs = {name: value for name, value in encoded.items() if name not in ("input_ids", "attention_mask")}
    return ChatPrompt(encoded["input_ids"][0].tolist(), inputs)


def _variables(given: TemplateFields) -> dict[str, Any]:
    """Variables of the template, by name.

    Raises:
        ApiError: a variable has the name of an argument of the call.
    """
    variables = {name: value for _, named in given.template_variables() for name, value in named.items()}
    for name in variables.keys() & {*_ARGUMENTS, "messages"}:
        param = f"chat_template_kwargs.{name}"
        raise ApiError(f"{param}: it is not a variable of a template", param=param, code="invalid_value")
    return variables


def _log_unused(template: str, given: TemplateFields) -> None:
    """Log each field none of whose variables occurs in ``template``."""
    for field, named in given.template_variables():
        if not any(re.search(rf"\b{re.escape(name)}\b", template) for name in named):
            log_ignored(field, "the chat template has no such variable")

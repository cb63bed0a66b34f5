"""Conversations in the form of chat templates. Tools, calls and results that a template does not write become text of
messages in a default form.

Source: calls and results are written as for Hermes' models (github.com/NousResearch/Hermes-Function-Calling).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from speccompile.serve.chat_template import call_syntax, writes_system, writes_tools, written_calls
from speccompile.serve.ignored import log_ignored
from speccompile.serve.image_parts import ImageReader
from speccompile.serve.message_fields import ImageUrl, Message
from speccompile.serve.tool_fields import Tool
from speccompile.serve.tool_grammar import CallSyntax

#: Short, since it is part of every prompt. The example is not valid JSON, so models do not copy it.
_TOOLS_TEXT = """You can call these functions:
{functions}
To call one, write:
<tool_call>
{{"name": ..., "arguments": {{...}}}}
</tool_call>"""

Conversation = list[dict[str, Any]]
#: A text, or texts and images in parts.
Content = str | list[dict[str, Any]]


def conversation_of(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[Tool] | None,
    images: ImageReader | None = None,
) -> tuple[Conversation, list[dict[str, Any]] | None]:
    """Messages and tools as arguments of the chat template of ``tokenizer``.

    Args:
        images: reads the images of messages.

    Raises:
        ApiError: an image cannot be read.
    """
    if any(message.model_extra for message in messages):
        log_ignored("a field of a message that the API does not have", "only chat templates read it")
    conversation = [_as_dict(message) for message in messages]
    for index, message in enumerate(messages):
        if message.parts and images is not None:
            conversation[index]["content"] = _parts_of(message, images, f"messages[{index}].content")
    schemas = [tool.model_dump(exclude_none=True) for tool in tools or ()] or None
    if any(message.tool_calls or message.role == "tool" for message in messages):
        written = written_calls(tokenizer, tools=schemas is not None)
        # Calls are processed before results, which have the names of their calls.
        if not written.results:
            conversation = _with_results(conversation)
        if not written.calls:
            conversation = _with_calls(conversation, call_syntax(tokenizer))
    if schemas is not None and not writes_tools(tokenizer):
        return _with_tools(conversation, schemas, system=writes_system(tokenizer)), None
    return conversation, schemas


def _as_dict(message: Message) -> dict[str, Any]:
    """Convert a message, without missing fields. The role of developers becomes ``system``, which templates know."""
    shown = message.model_dump(exclude_none=True)
    return shown | {"role": "system"} if message.role == "developer" else shown


def _with_tools(conversation: Conversation, schemas: Sequence[dict[str, Any]], *, system: bool) -> Conversation:
    """Insert ``schemas`` into the system message, or without ``system`` into the first message of a user."""
    functions = "\n".join(json.dumps(schema["function"], ensure_ascii=False) for schema in schemas)
    text = _TOOLS_TEXT.format(functions=functions)
    role = "system" if system else "user"
    index = next((index for index, message in enumerate(conversation) if message["role"] == role), None)
    if index is None or (system and index > 0):
        return [{"role": role, "content": text}, *conversation]
    message = conversation[index]
    contents = (message["content"], text) if system else (text, message["content"])
    changed = message | {"content": _joined(*contents)}
    return [*conversation[:index], changed, *conversation[index + 1 :]]


def _with_calls(conversation: Conversation, syntax: CallSyntax) -> Conversation:
    """Move the calls of assistants into the contents of their messages."""
    found = []
    for message in conversation:
        kept = dict(message)
        calls = [call["function"] for call in kept.pop("tool_calls", ())]
        texts = [syntax.text_of(call["name"], call["arguments"]) for call in calls]
        kept["content"] = "\n".join(filter(None, (message["content"], *texts)))
        found.append(kept)
    return found


def _with_results(conversation: Conversation) -> Conversation:
    """Convert results of calls to messages of the user, one for all results of a message's calls and the user's
    message after them: templates may demand that roles alternate."""
    found: Conversation = []
    names: dict[str, str] = {}
    is_result = False
    for message in conversation:
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ()) if "id" in call}
        if message["role"] == "user" and is_result:
            found[-1]["content"] = _joined(found[-1]["content"], message["content"])
        elif message["role"] != "tool":
            found.append(message)
        else:
            name = names.get(message.get("tool_call_id", ""), message.get("name"))
            text = _result_text(name, message["content"])
            if is_result:
                found[-1]["content"] += f"\n{text}"
            else:
                found.append({"role": "user", "content": text})
        is_result = message["role"] == "tool"
    return found


def _parts_of(message: Message, images: ImageReader, param: str) -> list[dict[str, Any]]:
    """The content of a message with images, in the form of processors' templates."""
    return [
        {"type": "image", "image": images.read(part.url, param)} if isinstance(part, ImageUrl) else text_part(part)
        for part in message.parts
    ]


def text_part(text: str) -> dict[str, Any]:
    """A part of a content, in the form of processors' templates."""
    return {"type": "text", "text": text}


def in_parts(content: Content) -> list[dict[str, Any]]:
    """The parts of a content."""
    return [text_part(content)] if isinstance(content, str) else content


def _joined(first: Content, second: Content) -> Content:
    """Two contents with an empty line between them; of one with images, the parts of both."""
    if isinstance(first, str) and isinstance(second, str):
        return "\n\n".join(filter(None, (first, second)))
    return [part for part in (*in_parts(first), *in_parts(second)) if part.get("text") != ""]


def _result_text(name: str | None, content: str) -> str:
    result = {"content": content} if name is None else {"name": name, "content": content}
    return f"<tool_response>\n{json.dumps(result, ensure_ascii=False)}\n</tool_response>"

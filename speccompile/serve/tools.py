"""Tools of a chat: which grammar its answer follows, and the calls in it."""

from __future__ import annotations

import uuid
from typing import Any

from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion_message_function_tool_call import (
    Function as CalledFunction,
)
from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.fields import ChatBody
from speccompile.serve.tool_fields import NamedToolChoice, Tool
from speccompile.serve.tool_grammar import Call, CallSyntax, ToolGrammar, syntax_of


def grammar_of(body: ChatBody, tokenizer: PreTrainedTokenizerBase) -> ToolGrammar | None:
    """The grammar of the answer; None if it has no calls.

    Raises:
        ApiError: the choice names no tool, or there are two tools of one name.
    """
    choice = body.tool_choice
    if not body.tools or choice == "none":
        return None
    tools = {tool.function.name: tool for tool in body.tools}
    if len(tools) < len(body.tools):
        raise ApiError("tools: two have the same name", param="tools")
    chosen: list[Tool] = list(tools.values())
    if isinstance(choice, NamedToolChoice):
        if choice.function.name not in tools:
            message = f"tool_choice.function.name: no tool is called {choice.function.name!r}"
            raise ApiError(message, param="tool_choice.function.name")
        chosen = [tools[choice.function.name]]
    return ToolGrammar(
        tuple((tool.function.name, tool.function.parameters) for tool in chosen),
        syntax(tokenizer),
        required=choice not in (None, "auto"),
        parallel=body.parallel_tool_calls and not isinstance(choice, NamedToolChoice),
    )


def syntax(tokenizer: PreTrainedTokenizerBase) -> CallSyntax:
    template: Any = tokenizer.chat_template
    # Some tokenizers have several templates by name.
    return syntax_of(template if isinstance(template, str) else "".join(template.values()))


def whole_call(call: Call) -> ChatCompletionMessageFunctionToolCall:
    function = CalledFunction(name=call.name, arguments=call.arguments)
    return ChatCompletionMessageFunctionToolCall(id=_new_id(), type="function", function=function)


def streamed_call(call: Call, index: int) -> ChoiceDeltaToolCall:
    """A call as one piece of a stream."""
    function = ChoiceDeltaToolCallFunction(name=call.name, arguments=call.arguments)
    return ChoiceDeltaToolCall(index=index, id=_new_id(), type="function", function=function)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

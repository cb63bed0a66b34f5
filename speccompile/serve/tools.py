"""Tools of a chat: which grammar its answer follows, and the calls in it."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
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
from speccompile.serve.tool_grammar import CallSyntax, ToolGrammar, syntax_of
from speccompile.serve.tool_reader import Arguments, CallBegin, Item


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


@dataclass
class Call:
    """A call as far as it has arrived; ``arguments`` are the JSON text of an object."""

    name: str
    arguments: str = ""
    complete: bool = False

    def whole(self) -> ChatCompletionMessageFunctionToolCall:
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return ChatCompletionMessageFunctionToolCall(id=_new_id(), type="function", function=function)


class Calls(list[Call]):
    """The calls of one choice, in the making."""

    def add(self, items: Sequence[Item]) -> list[ChoiceDeltaToolCall]:
        """Take over what was read.

        Returns:
            The same as parts of one chunk of a stream, one for each call that ``items`` belong to.
        """
        deltas: dict[int, ChoiceDeltaToolCall] = {}
        for item in items:
            if isinstance(item, CallBegin):
                self.append(Call(item.name))
                function = ChoiceDeltaToolCallFunction(name=item.name, arguments="")
                begin = ChoiceDeltaToolCall(index=len(self) - 1, id=_new_id(), type="function", function=function)
                deltas[len(self) - 1] = begin
            elif isinstance(item, Arguments):
                call, index = self[-1], len(self) - 1
                call.arguments += item.text
                call.complete = item.last
                if index not in deltas:
                    deltas[index] = ChoiceDeltaToolCall(index=index, function=ChoiceDeltaToolCallFunction(arguments=""))
                written = deltas[index].function
                assert written is not None and written.arguments is not None
                written.arguments += item.text
        return list(deltas.values())

    @property
    def complete(self) -> bool:
        """There are calls, and none is unfinished."""
        return bool(self) and all(call.complete for call in self)


def _new_id() -> str:
    return f"call_{uuid.uuid4().hex[:24]}"

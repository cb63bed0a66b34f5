"""Tools of a chat: which grammar its answer follows, and the calls in it."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from openai.types.chat.chat_completion_chunk import ChoiceDeltaToolCall, ChoiceDeltaToolCallFunction
from openai.types.chat.chat_completion_message_function_tool_call import (
    ChatCompletionMessageFunctionToolCall,
)
from openai.types.chat.chat_completion_message_function_tool_call import (
    Function as CalledFunction,
)
from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError
from speccompile.serve.chat_template import call_syntax, writes_tools
from speccompile.serve.fields import ChatBody
from speccompile.serve.structure import source_of
from speccompile.serve.tool_fields import AllowedToolChoice, NamedToolChoice, Tool
from speccompile.serve.tool_grammar import ToolGrammar
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
    names, required = list(tools), choice == "required"
    if isinstance(choice, NamedToolChoice):
        names, required = _known([choice.function.name], tools, "tool_choice.function.name"), True
    elif isinstance(choice, AllowedToolChoice):
        allowed = [tool.function.name for tool in choice.allowed_tools.tools]
        names = _known(allowed, tools, "tool_choice.allowed_tools.tools")
        required = choice.allowed_tools.mode == "required"
    source = source_of(body)
    # A model whose template has no tools repeats a call for as long as it may.
    parallel = body.parallel_tool_calls and not isinstance(choice, NamedToolChoice) and writes_tools(tokenizer)
    return ToolGrammar(
        tuple((name, tools[name].function.parameters) for name in names),
        call_syntax(tokenizer),
        required=required,
        parallel=parallel,
        answer=None if source is None else (source[0].kind, source[0].text),
    )


def _known(names: list[str], tools: Mapping[str, Tool], param: str) -> list[str]:
    """``names`` without repetitions.

    Raises:
        ApiError: no tool has one of them.
    """
    for name in names:
        if name not in tools:
            raise ApiError(f"{param}: no tool is called {name!r}", param=param)
    return list(dict.fromkeys(names))


@dataclass
class ParsedCall:
    """A call as far as it has arrived; ``arguments`` are the JSON text of an object."""

    name: str
    arguments: str = ""
    complete: bool = False

    def whole(self) -> ChatCompletionMessageFunctionToolCall:
        """The call as an answer that is not streamed has it."""
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return ChatCompletionMessageFunctionToolCall(id=new_call_id(), type="function", function=function)


class Calls(list[ParsedCall]):
    """The calls of one choice, in the making."""

    def add(self, items: Sequence[Item]) -> list[ChoiceDeltaToolCall]:
        """Take over what was read.

        Returns:
            The same as parts of one chunk of a stream, one for each call that ``items`` belong to.
        """
        deltas: dict[int, ChoiceDeltaToolCall] = {}
        for item in items:
            if isinstance(item, CallBegin):
                self.append(ParsedCall(item.name))
                function = ChoiceDeltaToolCallFunction(name=item.name, arguments="")
                begin = ChoiceDeltaToolCall(index=len(self) - 1, id=new_call_id(), type="function", function=function)
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


def new_call_id() -> str:
    """A fresh id of a call."""
    return f"call_{uuid.uuid4().hex[:24]}"

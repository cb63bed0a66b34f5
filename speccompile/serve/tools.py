"""Tools of a chat: the grammar of its answer, and the calls in the answer."""

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
from speccompile.serve.tool_fields import AllowedToolChoice, Function, NamedToolChoice, Tool
from speccompile.serve.tool_grammar import GrammarTool, ToolGrammar
from speccompile.serve.tool_reader import Arguments, CallBegin, Item


def grammar_of(body: ChatBody, tokenizer: PreTrainedTokenizerBase) -> ToolGrammar | None:
    """Grammar of the answer; None if the answer cannot have calls.

    Raises:
        ApiError: the choice names an unknown tool, or two tools have the same name.
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
    # A model whose template does not write tools would repeat a call until a limit.
    parallel = body.parallel_tool_calls and not isinstance(choice, NamedToolChoice) and writes_tools(tokenizer)
    return ToolGrammar(
        tuple(_in_grammar(tools[name].function) for name in names),
        call_syntax(tokenizer),
        required=required,
        parallel=parallel,
        answer=None if source is None else (source[0].kind, source[0].text),
    )


def _in_grammar(function: Function) -> GrammarTool:
    return GrammarTool(function.name, function.parameters, bool(function.strict))


def _known(names: list[str], tools: Mapping[str, Tool], param: str) -> list[str]:
    """Return ``names`` without repetitions.

    Raises:
        ApiError: a name is not that of a tool.
    """
    for name in names:
        if name not in tools:
            raise ApiError(f"{param}: no tool is called {name!r}", param=param)
    return list(dict.fromkeys(names))


@dataclass
class ParsedCall:
    """A call, possibly incomplete. ``arguments`` are the JSON text of an object."""

    name: str
    arguments: str = ""
    complete: bool = False

    def whole(self) -> ChatCompletionMessageFunctionToolCall:
        """The call in the format of an answer that is not streamed."""
        function = CalledFunction(name=self.name, arguments=self.arguments)
        return ChatCompletionMessageFunctionToolCall(id=new_call_id(), type="function", function=function)


class Calls(list[ParsedCall]):
    """Calls of one choice while it is generated."""

    def add(self, items: Sequence[Item]) -> list[ChoiceDeltaToolCall]:
        """Add parsed items.

        Returns:
            Parts for one chunk of a stream, one for each call that ``items`` belong to.
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
        """Whether there are calls, and all are complete."""
        return bool(self) and all(call.complete for call in self)


def new_call_id() -> str:
    """Create a new call id."""
    return f"call_{uuid.uuid4().hex[:24]}"

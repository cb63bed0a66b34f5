"""Fields of ``/tokenize`` and ``/detokenize``."""

from __future__ import annotations

from pydantic import Field, model_validator

from speccompile.serve.base_fields import Fields, TokenIds, wrong
from speccompile.serve.fields import Message
from speccompile.serve.template_fields import TemplateFields
from speccompile.serve.tool_fields import Tool


class TokenizeBody(TemplateFields):
    """Fields of ``/tokenize``, compatible with vLLM."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] = Field(default_factory=list)
    add_special_tokens: bool = True
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_input(self) -> TokenizeBody:
        if (self.prompt is None) == (self.messages is None):
            raise wrong("prompt", "give it or messages")
        if self.messages is None:
            for name in ("tools", *TemplateFields.model_fields):
                if getattr(self, name) != type(self).model_fields[name].get_default(call_default_factory=True):
                    raise wrong(name, "it needs messages")
        elif "add_special_tokens" in self.model_fields_set and self.add_special_tokens:
            raise wrong("add_special_tokens", "the chat template writes them; it needs prompt")
        if self.messages:
            self.check_continued(self.messages[-1].role, calls=bool(self.messages[-1].tool_calls))
        return self


class DetokenizeBody(Fields):
    """Fields of ``/detokenize``, compatible with vLLM."""

    model: str | None = None
    tokens: TokenIds

"""Fields of chats for the chat template."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from speccompile.serve.base_fields import Fields, wrong

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Reasoning(Fields):
    """``reasoning``: the effort in the form of the Responses API and of OpenRouter. Its other fields select which
    reasoning an answer shows, and have no effect here."""

    ignores = ("a field of reasoning other than effort", "the chat template has no variable for it")

    effort: Effort | None = None


class TemplateFields(Fields):
    """Variables of a request for the template, in addition to messages and tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict, max_length=64)
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _template_fields_agree(self) -> TemplateFields:
        opens_answer = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens_answer:
            raise wrong("continue_final_message", "give it or add_generation_prompt, not both")
        return self

    def check_continued(self, role: str, *, calls: bool) -> None:
        """Raise a validation error if a last message of ``role``, with ``calls`` or not, cannot be continued. In a
        continued message the prompt ends after its text."""
        if self.continue_final_message and (calls or role == "tool"):
            raise wrong("continue_final_message", "the last message must be a text, not a call or a result of one")

    @property
    def opens_answer(self) -> bool:
        """Whether the prompt ends with the beginning of a new message of the assistant."""
        return self.add_generation_prompt and not self.continue_final_message

    def template_variables(self) -> list[tuple[str, dict[str, Any]]]:
        """Variables of the template, by the field that they come from. A field has an effect if the template uses one
        of its variables. Later variables replace earlier ones of the same name.

        As in vLLM, an effort also switches the thinking of a template on or off, if the template has such a switch.
        """
        found: list[tuple[str, dict[str, Any]]] = []
        efforts = {"reasoning_effort": self.reasoning_effort, "reasoning": self.reasoning and self.reasoning.effort}
        for field, effort in efforts.items():
            if effort is not None:
                found.append((field, {"reasoning_effort": effort, "enable_thinking": effort != "none"}))
        if self.verbosity is not None:
            found.append(("verbosity", {"verbosity": self.verbosity}))
        return found + [("chat_template_kwargs", {name: value}) for name, value in self.chat_template_kwargs.items()]

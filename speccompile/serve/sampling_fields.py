"""Fields that completions, chats and responses share: the choice of tokens, and the end of an answer."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from speccompile.errors.base import clipped
from speccompile.serve.base_fields import Fields, Whole, wrong
from speccompile.serve.ignored import log_ignored
from speccompile.serve.message_fields import Content

#: Limits of the number of stop strings and of their characters together: each piece of text is compared with all.
MOST_STOPS, MOST_STOP_CHARACTERS = 128, 8192
MOST_BIAS = 100


def _stops(value: Any) -> Any:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("it must be a text, or a list of texts")
    # Clients send an empty text for none.
    texts = list(dict.fromkeys(filter(None, texts)))
    if len(texts) > MOST_STOPS or sum(map(len, texts)) > MOST_STOP_CHARACTERS:
        raise ValueError(f"at most {MOST_STOPS} texts, of at most {MOST_STOP_CHARACTERS} characters together")
    return texts


#: Digits of a number of 64 bits.
_LONGEST_ID = 19


def _bias(value: Any) -> Any:
    """Convert names to token ids, since names in JSON are texts."""
    if not isinstance(value, dict) or not all(name.isascii() and name.isdecimal() for name in value):
        raise ValueError("it must map token ids to numbers")
    if long := next((name for name in value if len(name) > _LONGEST_ID), None):
        raise ValueError(f"{clipped(long)} is not a token id")
    # Of several wrong values, the first one is reported.
    bad = next((item for item in value.items() if not _is_bias(item[1])), None)
    return {int(name): bias for name, bias in (value.items() if bad is None else [bad])}


_Bias = Annotated[float, Field(ge=-MOST_BIAS, le=MOST_BIAS)]


def _is_bias(value: Any) -> bool:
    return type(value) in (int, float) and -MOST_BIAS <= value <= MOST_BIAS


_Choice = Annotated[str, Field(min_length=1)]


class StructuredOutputs(Fields):
    """vLLM's field for the structure of a text. Exactly one of its fields is set."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = Field(None, min_length=1)
    choice: list[_Choice] | None = Field(None, min_length=1)
    grammar: str | None = Field(None, min_length=1)
    json_object: Literal[True] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(self.model_fields_set) != 1:
            raise ValueError("exactly one of json, regex, choice, grammar and json_object must be given")
        return self


class PredictionContent(Fields):
    """Expected text of the answer."""

    type: Literal["content"]
    content: Content


class StreamOptions(Fields):
    """``stream_options``."""

    # The last event of a response always has the usage, so this has no effect there.
    include_usage: bool = False
    include_obfuscation: bool = False

    @model_validator(mode="after")
    def _log_ignored(self) -> StreamOptions:
        if self.include_obfuscation:
            log_ignored("stream_options.include_obfuscation", "events are not padded")
        return self


class SamplingFields(Fields):
    """Fields of all requests that generate text: those of the OpenAI API, and additional ones of vLLM."""

    #: Names of the endpoint's fields for the largest number of new tokens.
    token_limits: ClassVar[tuple[str, ...]]

    model: str | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    seed: Whole | None = None
    stop: Annotated[list[str], BeforeValidator(_stops)] = Field(default_factory=list)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[int, _Bias] | None, BeforeValidator(_bias)] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = Field(None, max_length=256)
    # Newer name of ``user`` in the API.
    safety_identifier: str | None = Field(None, max_length=256)
    prediction: PredictionContent | None = None
    # Fields of vLLM.
    top_k: Whole | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    # Field of transformers.
    typical_p: float | None = Field(None, gt=0, le=1)
    min_tokens: Whole | None = Field(None, ge=0)
    ignore_eos: bool = False
    stop_token_ids: list[Whole] = Field(default_factory=list, max_length=64)
    skip_special_tokens: bool = True
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = Field(None, min_length=1)
    guided_choice: list[_Choice] | None = Field(None, min_length=1)
    guided_grammar: str | None = Field(None, min_length=1)
    structured_outputs: StructuredOutputs | None = None
    priority: Whole = Field(0, gt=-(2**63))
    # Option of the engine.
    num_draft_tokens: Whole | None = Field(None, ge=0)

    @property
    @abstractmethod
    def own_form(self) -> str | None:
        """Field of the endpoint with the structure of the answer; None if the answer is unconstrained."""

    @model_validator(mode="after")
    def _fields_agree(self) -> SamplingFields:
        names = ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs")
        given = [name for name in names if getattr(self, name) is not None]
        given += [] if self.own_form is None else [self.own_form]
        if len(given) > 1:
            raise wrong(given[0], f"{' and '.join(given)} cannot be followed together")
        if self.stream_options is not None and not self.stream:
            log_ignored("stream_options", "the answer is not streamed")
        for name in self.token_limits:
            most = getattr(self, name)
            if self.min_tokens is not None and most is not None and self.min_tokens > most:
                raise wrong("min_tokens", f"it must be at most {name}, which is {most}")
        return self

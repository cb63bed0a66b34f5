"""The options of requests: those of ``Engine.submit``, ``Speculator.generate`` and ``Speculator.save_hidden_states``.

Values are checked here, except for checks that need the model or the engine. This module does not import torch, since
the command line shows some of the options. ``python -m speccompile.runtime.request_options`` prints the table of
docs/reference/options.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, ClassVar

from speccompile.errors import InvalidOption
from speccompile.utils.not_given import NOT_GIVEN, NotGiven
from speccompile.utils.numbers import is_real, python_numbers
from speccompile.utils.options import Options, WholeNumber, flag, flag_or_none, option

if TYPE_CHECKING:
    import torch
    from transformers import GenerationConfig, PreTrainedTokenizerBase

    from speccompile.runtime.listener import Streamer
    from speccompile.runtime.target import EosTokens


def _flag_or_id(where: str, name: str, value: Any) -> bool | str:
    if not isinstance(value, bool | str) or value == "":
        raise InvalidOption(where=where, name=name, value=value, reason="use True, False, or the id of its record")
    return value


def _names(where: str, name: str, value: Any) -> tuple[str, ...] | None:
    names = (value,) if isinstance(value, str) else value
    if names is None:
        return None
    if not isinstance(names, list | tuple) or not names or not all(isinstance(item, str) and item for item in names):
        reason = "use a non-empty string, a list of non-empty strings, or None"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return tuple(names)


def seconds_or_none(where: str, name: str, value: Any) -> float | None:
    """Return a number of seconds as a float, or None.

    Raises:
        InvalidOption: ``value`` is neither a number of seconds nor None.
    """
    number = python_numbers(value)
    if number is None:
        return None
    if not is_real(number) or not number >= 0:
        reason = "it must be a number of seconds, at least 0, or None"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return float(number)


# Options of several calls.
MAX_NEW_TOKENS = option("Most new tokens.", WholeNumber(1, or_none=True))
EOS = option("One or several ids that end a sequence.")
STOP = option("One or several texts that end a sequence; they need `tokenizer`.")
CRITERIA = option("transformers' `StoppingCriteria`, one or several.")
TOKENIZER = option("The tokenizer of the token ids.")
STREAMER = option("A transformers streamer.")
DO_SAMPLE = option("Whether tokens are drawn; otherwise the most likely one is chosen.", flag_or_none)
SEED = option("Seed of what is drawn.", WholeNumber(0, 2**63 - 1, or_none=True))
NUM_DRAFT_TOKENS = option("Most draft tokens of a step, 0 for none.")
SCORES = option("Whether to return the scores after all processors, of each new token.", flag_or_none)
LOGITS = option("Whether to return the model's own logits, of each new token.", flag_or_none)


@dataclass(frozen=True)
class SubmitOptions(Options):
    """Options of :meth:`speccompile.runtime.engine.Engine.submit`, whose docstring describes each in detail.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "submit"
    inputs: ClassVar[tuple[str, ...]] = ("ids", "inputs")

    max_new_tokens: int | None = field(default=None, metadata=MAX_NEW_TOKENS)
    eos_token_id: EosTokens = field(default=None, metadata=EOS)
    stop: str | Sequence[str] | None = field(default=None, metadata=STOP)
    stopping_criteria: Any = field(default=None, metadata=CRITERIA)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, metadata=TOKENIZER)
    streamer: Streamer | None = field(default=None, metadata=STREAMER)
    do_sample: bool | None = field(default=None, metadata=DO_SAMPLE)
    seed: int | None = field(default=None, metadata=SEED)
    priority: int = field(
        default=0,
        metadata=option(
            "Of two waiting requests, the one with the larger number goes first; in the server, as in vLLM, the "
            "smaller.",
            WholeNumber(-(2**63), 2**63 - 1),
        ),
    )
    num_draft_tokens: int | None = field(default=None, metadata=NUM_DRAFT_TOKENS)
    prediction: Sequence[int] | torch.Tensor | None = field(
        default=None, metadata=option("Token ids that the new text is expected to have; mode `prediction` drafts them.")
    )
    logprobs: bool = field(
        default=False, metadata=option("Whether to return the log-probability of each new token.", flag)
    )
    prompt_logprobs: bool = field(
        default=False, metadata=option("Whether to return the log-probability of each prompt token.", flag)
    )
    top_logprobs: int = field(
        default=0,
        metadata=option(
            "How many of the likeliest tokens to return at each new token, 0 for none.", WholeNumber(0, 100)
        ),
    )
    output_logits: bool = field(default=False, metadata=LOGITS | {"read": flag})
    output_scores: bool = field(default=False, metadata=SCORES | {"read": flag})
    record: bool | str = field(
        default=True,
        metadata=option("Whether hidden states are saved, where the wrap saves them, or the record's id.", _flag_or_id),
    )
    adapter: str | None = field(default=None, metadata=option("The name of the LoRA adapter that the model has."))
    client: str | Sequence[str] | None = field(
        default=None, metadata=option("The client of the request; clients get slots in rotation.", _names)
    )
    #: Options of the sampling pipeline, by name (:data:`speccompile.sampling.OPTIONS`).
    sampling: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class GenerateOptions(Options):
    """Options of :meth:`speccompile.Speculator.generate`, whose docstring describes each in detail. An option whose
    default is ``NOT_GIVEN`` is a field of a ``GenerationConfig``, whose value it has if it is not given.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "generate"
    inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask", "inputs")

    generation_config: GenerationConfig | None = field(
        default=None, metadata=option("A `GenerationConfig`, over which the other options take precedence.")
    )
    max_new_tokens: int | NotGiven | None = field(default=NOT_GIVEN, metadata=MAX_NEW_TOKENS)
    max_length: int | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("Most tokens, prompt included, where `max_new_tokens` is given nowhere.")
    )
    max_time: float | NotGiven | None = field(
        default=NOT_GIVEN,
        metadata=option("Seconds after which rows end with their next token.", seconds_or_none),
    )
    eos_token_id: EosTokens | NotGiven = field(default=NOT_GIVEN, metadata=EOS)
    pad_token_id: int | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("The id that pads rows that end early.")
    )
    bos_token_id: int | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("The id that is the prompt where there is no other.")
    )
    num_return_sequences: int | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("Continuations of each prompt.", WholeNumber(1, or_none=True))
    )
    num_draft_tokens: int | None = field(default=None, metadata=NUM_DRAFT_TOKENS)
    stop_strings: str | Sequence[str] | NotGiven | None = field(default=NOT_GIVEN, metadata=STOP)
    tokenizer: PreTrainedTokenizerBase | None = field(default=None, metadata=TOKENIZER)
    stopping_criteria: Any = field(default=None, metadata=CRITERIA)
    streamer: Streamer | None = field(default=None, metadata=STREAMER)
    do_sample: bool | NotGiven | None = field(default=NOT_GIVEN, metadata=DO_SAMPLE)
    seed: int | None = field(default=None, metadata=SEED)
    return_dict_in_generate: bool | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("Whether to return transformers' `GenerateDecoderOnlyOutput`.", flag_or_none)
    )
    output_scores: bool | NotGiven | None = field(default=NOT_GIVEN, metadata=SCORES)
    output_logits: bool | NotGiven | None = field(default=NOT_GIVEN, metadata=LOGITS)
    output_attentions: bool | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("Refused if True: a step keeps no attentions.", flag_or_none)
    )
    output_hidden_states: bool | NotGiven | None = field(
        default=NOT_GIVEN, metadata=option("Refused if True: a step keeps no hidden states.", flag_or_none)
    )
    record: bool = field(
        default=True, metadata=option("Whether hidden states are saved, where the wrap saves them.", flag)
    )
    adapter: str | Sequence[str | None] | None = field(
        default=None, metadata=option("The name of the LoRA adapter that the model has, or one for each prompt.")
    )
    #: All other keywords: options of the sampling pipeline, and further parameters of transformers' ``generate``.
    others: Mapping[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(keywords: Mapping[str, Any]) -> GenerateOptions:
        """The options of a call with ``keywords``."""
        own = {item.name for item in fields(GenerateOptions)} - {"others"}
        others = {name: value for name, value in keywords.items() if name not in own}
        return GenerateOptions(**{name: keywords[name] for name in keywords.keys() & own}, others=others)

    def keywords(self) -> dict[str, Any]:
        """The keywords of the call whose options these are, without those at their defaults."""
        own = {item.name: getattr(self, item.name) for item in fields(self) if item.name != "others"}
        defaults = {item.name: item.default for item in fields(self)}
        return {name: value for name, value in own.items() if value is not defaults[name]} | {**self.others}

    def config_fields(self) -> dict[str, Any]:
        """Return the given fields of a ``GenerationConfig``, by name; None is a value."""
        names = [item.name for item in fields(self) if item.default is NOT_GIVEN]
        return {name: value for name in names if (value := getattr(self, name)) is not NOT_GIVEN}


@dataclass(frozen=True)
class SaveOptions(Options):
    """Options of :meth:`speccompile.Speculator.save_hidden_states`, whose docstring describes each in detail.

    Raises:
        InvalidOption: a value is not valid.
    """

    where: ClassVar[str] = "save_hidden_states"
    inputs: ClassVar[tuple[str, ...]] = ("texts",)

    ids: Sequence[str | None] | None = field(default=None, metadata=option("Ids of the records."))
    loss_masks: Sequence[Sequence[int]] | None = field(
        default=None, metadata=option("For each text a 0 or 1 for each of its tokens.")
    )
    max_new_tokens: int = field(default=1, metadata=MAX_NEW_TOKENS | {"read": WholeNumber(1)})
    do_sample: bool | None = field(default=None, metadata=DO_SAMPLE)
    seed: int | None = field(default=None, metadata=SEED)
    progress: bool = field(default=True, metadata=option("Whether to show a bar on stderr, if that is a terminal."))
    #: Options of the sampling pipeline, by name.
    sampling: Mapping[str, Any] = field(default_factory=dict)


if __name__ == "__main__":
    print(SubmitOptions.table())

"""Prompts for the text between two given texts, with the special tokens of models that were trained for it."""

from __future__ import annotations

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from speccompile.serve.api_error import ApiError


@dataclass(frozen=True)
class InfillForm:
    """Format of such a prompt for a family of models.

    Args:
        template: with ``{prefix}`` and ``{suffix}``.
        tokens: tokens of the template. The tokenizer must have all of them.
        ends: further tokens that end an answer, if the tokenizer has them.
    """

    template: str
    tokens: tuple[str, str, str]
    ends: tuple[str, ...] = ()


#: Formats by precedence. The tokenizer's format is the first one whose tokens it has.
INFILL_FORMS = (
    # Qwen2.5-Coder, CodeGemma.
    InfillForm(
        "<|fim_prefix|>{prefix}<|fim_suffix|>{suffix}<|fim_middle|>",
        ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
        ("<|fim_pad|>", "<|file_sep|>", "<|file_separator|>"),
    ),
    # StarCoder, StarCoder2, Granite, StableCode.
    InfillForm(
        "<fim_prefix>{prefix}<fim_suffix>{suffix}<fim_middle>",
        ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
        ("<fim_pad>", "<file_sep>"),
    ),
    # SantaCoder.
    InfillForm(
        "<fim-prefix>{prefix}<fim-suffix>{suffix}<fim-middle>", ("<fim-prefix>", "<fim-suffix>", "<fim-middle>")
    ),
    # DeepSeek-Coder.
    InfillForm(
        "<｜fim▁begin｜>{prefix}<｜fim▁hole｜>{suffix}<｜fim▁end｜>",
        ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    ),
    # Code Llama, whose tokens include the space before them.
    InfillForm("<PRE> {prefix} <SUF>{suffix} <MID>", ("▁<PRE>", "▁<SUF>", "▁<MID>"), ("▁<EOT>",)),
    # Codestral.
    InfillForm("[SUFFIX]{suffix}[PREFIX]{prefix}", ("[SUFFIX]", "[PREFIX]", "[MIDDLE]")),
)


def infill_form(tokenizer: PreTrainedTokenizerBase) -> InfillForm:
    """Return the format whose tokens ``tokenizer`` has.

    Raises:
        ApiError: the tokenizer has the tokens of no format.
    """
    for form in INFILL_FORMS:
        if all(_id_of(tokenizer, token) is not None for token in form.tokens):
            return form
    message = "suffix: not supported, since the tokenizer has no tokens to fill in the middle"
    raise ApiError(message, param="suffix", code="unsupported_field")


def infill_prompt(form: InfillForm, prefix: str, suffix: str) -> str:
    """Prompt for the text between ``prefix`` and ``suffix``."""
    return form.template.format(prefix=prefix, suffix=suffix)


def check_infill_ids(tokenizer: PreTrainedTokenizerBase, form: InfillForm, ids: list[int]) -> None:
    """Check that ``ids``, of a prompt in ``form``, have all tokens of the format.

    Raises:
        ApiError: a token is missing, since the tokenizer (mistral-common) does not parse special tokens in a text.
    """
    written = [token for token in form.tokens if token.strip("▁") in form.template]
    if any(_id_of(tokenizer, token) not in ids for token in written):
        message = "suffix: not supported, since the tokenizer does not parse special tokens in a text"
        raise ApiError(message, param="suffix", code="unsupported_field")


def infill_ends(tokenizer: PreTrainedTokenizerBase, form: InfillForm) -> list[int]:
    """Tokens that end an answer, in addition to the model's own."""
    return [found for token in form.ends if (found := _id_of(tokenizer, token)) is not None]


def _id_of(tokenizer: PreTrainedTokenizerBase, token: str) -> int | None:
    # Unknown tokens are converted to the id of the unknown token.
    found = tokenizer.convert_tokens_to_ids(token)
    return found if isinstance(found, int) and tokenizer.convert_ids_to_tokens(found) == token else None

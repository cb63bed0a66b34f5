"""Checks of a request's inputs: prompts, EOS ids and counts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import torch

from speccompile.errors import (
    EmptyPrompt,
    InvalidInput,
    InvalidOption,
    PromptTooLong,
    TokenOutOfVocabulary,
    TooManyEosTokens,
    UnknownOption,
    error_line,
)
from speccompile.graph.state import EOS_CAPACITY, Layout
from speccompile.sampling import OPTIONS
from speccompile.utils.numbers import is_int, python_numbers
from speccompile.utils.options import Options, WholeNumber
from speccompile.utils.warn import warn_caller


def read_num_draft_tokens(where: str, given: Any, layout: Layout) -> int | None:
    """Return the number as an int, or None.

    Raises:
        InvalidOption: it is neither.
    """
    value = python_numbers(given)
    good = is_int(value) and 0 <= value <= layout.max_draft_len
    if not (good or value is None):
        reason = f"it must be an int in 0 .. {layout.max_draft_len}, the largest tier, or None for no limit"
        raise InvalidOption(where=where, name="num_draft_tokens", value=given, reason=reason)
    return cast("int | None", value)


def check_options(options: Options, sampling: Collection[str]) -> None:
    """Refuse names in ``sampling`` that are not options of the sampling pipeline.

    Args:
        options: options of the call, for the message.

    Raises:
        UnknownOption: a name is unknown; the error has these names, and all that the call accepts.
    """
    if unknown := set(sampling) - OPTIONS.keys():
        known = ", ".join([*options.parameters(), *OPTIONS])
        raise UnknownOption(where=options.where, names=", ".join(sorted(unknown)), known=known)


def read_prompts(
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    pad: int | None,
    eos: list[int],
    layout: Layout,
    copies: int = 1,
) -> tuple[list[list[int]], torch.Tensor]:
    """Return the rows of a batch as lists of token ids without padding, each row ``copies`` times; and bool ``[B, P]``,
    False at padding. Padding after the last token of a row causes a warning.

    Args:
        input_ids: ``[B, P]``, integer.
        attention_mask: ``[B, P]``, 0 at padding, at any position of a row. With None, as in transformers, ``pad`` marks
            padding if it occurs and is not an EOS id.

    Raises:
        InvalidInput, EmptyPrompt, PromptTooLong, TokenOutOfVocabulary.
    """
    if not isinstance(input_ids, torch.Tensor) or input_ids.ndim != 2:
        raise InvalidInput(name="input_ids", reason="it must be a tensor [rows, tokens]")
    if input_ids.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(
            name="input_ids", reason=f"its dtype is {input_ids.dtype}, not an integer type of 32 or 64 bits"
        )
    rows = input_ids.shape[0]
    if rows == 0:
        raise InvalidInput(name="input_ids", reason="it has no rows")
    if attention_mask is None:
        kept = torch.ones_like(input_ids, dtype=torch.bool)
        if pad is not None and pad not in eos:
            kept = input_ids.ne(pad)
    elif not isinstance(attention_mask, torch.Tensor):
        raise InvalidInput(name="attention_mask", reason="it must be a tensor like input_ids")
    elif attention_mask.shape != input_ids.shape:
        raise InvalidInput(
            name="attention_mask",
            reason=f"its shape {list(attention_mask.shape)} is not that of input_ids {list(input_ids.shape)}",
        )
    elif not (attention_mask.eq(0) | attention_mask.eq(1)).all():
        # transformers computes positions as sums of the mask.
        raise InvalidInput(name="attention_mask", reason="it must be 1 at tokens and 0 at padding, and nothing else")
    else:
        kept = attention_mask.bool().to(input_ids.device)
    prompts = []
    for row in range(rows):
        if attention_mask is None and input_ids.shape[1] and not kept[row].any():
            reason = f"row {row} only has the pad token {pad}; give an attention_mask that is 1 at its tokens"
            raise InvalidInput(name="input_ids", reason=reason)
        prompts.append(input_ids[row][kept[row]].tolist())
        check_prompt(prompts[-1], row, layout)
    if padded := [row for row in range(rows) if not kept[row, -1]]:
        warn_caller(
            f"rows {padded} have padding after their last token. It is left out, as padding on the left would be; "
            "transformers continues from the padding. Pad on the left: tokenizer.padding_side = 'left'"
        )
    return [prompt for prompt in prompts for _ in range(copies)], kept


def check_prompt(prompt: list[int], row: int, layout: Layout) -> None:
    """Check the token ids of a prompt.

    Raises:
        EmptyPrompt, PromptTooLong, TokenOutOfVocabulary: the prompt is not valid.
    """
    if not prompt:
        raise EmptyPrompt(row=row)
    if len(prompt) > layout.max_len - 1:
        raise PromptTooLong(row=row, length=len(prompt), max_len=layout.max_len, allowed=layout.max_len - 1)
    for token in prompt:
        if not 0 <= token < layout.vocab_size:
            raise TokenOutOfVocabulary(row=row, token=token, last=layout.vocab_size - 1, vocab=layout.vocab_size)


def read_prompt(given: Sequence[int] | torch.Tensor, row: int, layout: Layout) -> list[int]:
    """Return the token ids of one prompt, given as a list or a tensor.

    Raises:
        InvalidInput, EmptyPrompt, PromptTooLong, TokenOutOfVocabulary.
    """
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(name=f"prompt {row}", reason=f"it is not a list of token ids ({error})") from error
    if ids.numel() == 0:
        raise EmptyPrompt(row=row)
    one_row = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
    if not one_row or ids.dtype not in (torch.int64, torch.int32):
        raise InvalidInput(name=f"prompt {row}", reason="it must be a list (or a row) of whole token ids")
    prompt: list[int] = ids.reshape(-1).tolist()
    check_prompt(prompt, row, layout)
    return prompt


def read_prediction(where: str, given: Sequence[int] | torch.Tensor | None, layout: Layout) -> tuple[int, ...]:
    """Return the predicted tokens of a request; empty without a prediction.

    Raises:
        InvalidOption: the mode does not draft from predictions, there are too many tokens, or they are not token ids.
    """
    if given is None:
        return ()

    def invalid(reason: str) -> InvalidOption:
        return InvalidOption(where=where, name="prediction", value=given, reason=reason)

    if "prediction" not in layout.tensors:
        raise invalid("no drafter reads it; wrap with mode='prediction', or with it as the first of several modes")
    try:
        ids = torch.as_tensor(given)
    except (TypeError, ValueError, RuntimeError) as error:
        raise invalid(f"it must be token ids ({error_line(error)})") from None
    one_row = ids.ndim == 1 or (ids.ndim == 2 and ids.shape[0] == 1)
    if ids.numel() and (not one_row or ids.dtype not in (torch.int64, torch.int32)):
        raise invalid("it must be a list (or a row) of whole token ids")
    tokens: list[int] = ids.reshape(-1).tolist()
    if len(tokens) > layout.max_len:
        raise invalid(f"it has {len(tokens)} tokens; at most {layout.max_len} (max_len) are allowed")
    if outside := [token for token in tokens if not 0 <= token < layout.vocab_size]:
        raise invalid(f"it holds {outside[0]}; token ids are 0 .. {layout.vocab_size - 1}")
    return tuple(tokens)


def token_list(value: int | Sequence[int] | torch.Tensor | None) -> list[int]:
    """Return EOS ids as a list. As in transformers, the argument is one id, several, or None.

    Raises:
        TooManyEosTokens: there are more than fit into a slot.
        InvalidInput: it is something else.
    """
    if value is None:
        return []
    try:
        tokens = torch.as_tensor(value).reshape(-1).tolist()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidInput(
            name="eos_token_id", reason=f"it must be a token id or a list of token ids ({error})"
        ) from error
    if not all(is_int(token) for token in tokens):
        raise InvalidInput(name="eos_token_id", reason="token ids are whole numbers")
    if len(tokens) > EOS_CAPACITY:
        raise TooManyEosTokens(count=len(tokens), capacity=EOS_CAPACITY)
    return tokens


def read_count(where: str, name: str, value: Any) -> int:
    """Return ``value`` as an int.

    Raises:
        InvalidOption: it is not a whole number of at least 1.
    """
    return cast(int, WholeNumber(1)(where, name, value))

"""Callables of the user's for a batch whose rows are decoded one by one: each row calls a copy of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from speccompile.errors import InvalidOption, error_line


def own_copy(name: str, called: Callable[..., Any], row: int) -> Callable[..., Any]:
    """A deep copy for one row, with memory that no other row changes; a function is the given one, since Python does
    not copy functions. Modules and tokenizers that are attributes are shared: they may be large.

    Args:
        name: of the option, for messages.

    Raises:
        InvalidOption: it cannot be copied.
    """
    held = getattr(called, "__dict__", {}).values()
    shared = {id(value): value for value in held if isinstance(value, torch.nn.Module | PreTrainedTokenizerBase)}
    try:
        return copy.deepcopy(called, shared)
    except Exception as error:
        reason = (
            f"each row needs its own copy, and copy.deepcopy fails for row {row}: {error_line(error)}. Submit each row "
            "with its own (spec.engine.submit)"
        )
        raise InvalidOption(where="generate", name=name, value=called, reason=reason) from error

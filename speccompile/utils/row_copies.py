"""Callables of the user's for a batch whose rows are decoded one by one: each row calls its own copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

from speccompile.errors import InvalidOption, error_line
from speccompile.utils.shared_functions import LARGE, SharedFunctions, reachable, variables


def own_copy(name: str, called: Callable[..., Any], row: int) -> Callable[..., Any]:
    """A deep copy for one row, with memory that no other row changes.

    Modules and tokenizers in it are shared, wherever they are held: they may be large. Python does not copy functions:
    one that holds anything is called by way of :class:`~speccompile.utils.shared_functions.SharedFunctions`.

    Args:
        name: of the option, for messages.

    Raises:
        InvalidOption: it cannot be copied, or a function holds what may be memory of one row.
    """
    reached = list(reachable(called))
    shared = {id(value): value for value in reached if isinstance(value, LARGE)}
    try:
        own = copy.deepcopy(called, shared)
    except Exception as error:
        reason = (
            f"each row needs its own copy, and copy.deepcopy fails for row {row}: {error_line(error)}. Submit each row "
            "with its own (spec.engine.submit)"
        )
        raise InvalidOption(where="generate", name=name, value=called, reason=reason) from error
    of_functions = [item for value in reached if isinstance(value, FunctionType) for item in variables(value)]
    return SharedFunctions(name, own, of_functions) if of_functions else own

"""Copies of a user's callable for each row of a batch. Rows are decoded one by one, and each calls its own copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import FunctionType
from typing import Any

from speccompile.errors import InvalidOption, error_line
from speccompile.utils.shared_functions import LARGE, SharedFunctions, reachable, variables


def own_copy(name: str, called: Callable[..., Any], row: int) -> Callable[..., Any]:
    """Return a deep copy for one row, whose state no other row changes.

    Modules and tokenizers inside are shared, since they may be large. Python does not copy functions: if a function
    holds any object, :class:`~speccompile.utils.shared_functions.SharedFunctions` calls it.

    Args:
        name: the option's name, for messages.

    Raises:
        InvalidOption: it cannot be copied, or a function holds an object that may be state of one row.
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

"""The option ``kv_memory`` of ``wrap``: the size of the pool of pages of KV. The command line uses it, so it imports no
torch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.utils.numbers import is_int

#: Positions of a page: a block of keys of the C++ kernel, so a result has the same bits as over one piece.
PAGE = 128
_UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_SIZE = re.compile(rf"(\d+(?:\.\d+)?) ?({'|'.join(_UNITS)})")


@dataclass(frozen=True)
class KVMemory:
    """The size of the pool, in tokens or in bytes.

    Args:
        given: the value of the option; None for the default, which holds a sequence of ``max_len`` whatever its size.
        page: positions of a page.
    """

    given: int | str | None
    tokens: int | None = None
    nbytes: int | None = None
    page: int = PAGE

    @staticmethod
    def of(value: int | str | KVMemory) -> KVMemory | None:
        """The size that a value of the option stands for; None if it stands for none."""
        if isinstance(value, KVMemory):
            return value
        if is_int(value) or (isinstance(value, str) and value.isdecimal()):
            return KVMemory(value, tokens=int(value)) if int(value) > 0 else None
        if isinstance(value, str) and (size := _SIZE.fullmatch(value)) is not None:
            return KVMemory(value, nbytes=int(float(size[1]) * _UNITS[size[2]]))
        return None


def read_kv_memory(where: str, name: str, value: Any) -> Any:
    """Check the option: a number of tokens, or a size such as ``"4GiB"``; None for no pages. Returns ``value``.

    Raises:
        InvalidOption: the value is neither.
    """
    if value is None or KVMemory.of(value) is not None:
        return value
    reason = 'it must be a number of tokens, or a size in KiB, MiB or GiB such as "4GiB"'
    raise InvalidOption(where=where, name=name, value=value, reason=reason)

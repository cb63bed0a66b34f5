"""The option ``adapters`` of ``wrap``. This module does not import torch, like those of the other options."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from speccompile.errors import InvalidOption
from speccompile.utils.options import OneOf, WholeNumber

#: PEFT's name for all linears but the lm_head.
ALL_LINEAR = "all-linear"
#: The rank of any difference of two heads.
FULL = "full"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Adapters:
    """Number and sizes of a wrap's LoRA adapters: ``wrap(adapters=Adapters(count=8))``.

    ``wrap`` allocates memory for ``count`` adapters of rank ``max_rank`` on all of ``modules``. Adapters that are
    loaded later need no further memory.

    Args:
        count: the largest number of adapters that are loaded at a time.
        max_rank: the largest rank of an adapter.
        modules: the linears of the decoder layers that can be adapted, by the last parts of their paths, in the form of
            PEFT's ``target_modules``: ``("q_proj", "v_proj")``. ``"all-linear"`` is all of them.
        dtype: the dtype of the adapters' matrices, ``"float32"``, ``"bfloat16"`` or ``"float16"``; None is the model's
            dtype. Sums are always float32.
        head_rank: memory for a draft head of each adapter, ``add_adapter(name, source, head=...)``: the largest rank of
            its difference from the shared head in a linear. ``"full"`` fits every head of the same sizes. None
            allocates none: all adapters use the shared head.

    Raises:
        InvalidOption: a value is not valid.
    """

    count: int
    max_rank: int = 16
    modules: str | Sequence[str] = ALL_LINEAR
    dtype: str | None = None
    head_rank: int | str | None = None

    def __post_init__(self) -> None:
        where = "Adapters"
        object.__setattr__(self, "count", WholeNumber(1)(where, "count", self.count))
        object.__setattr__(self, "max_rank", WholeNumber(1)(where, "max_rank", self.max_rank))
        if self.dtype is not None:
            OneOf(DTYPES)(where, "dtype", self.dtype)
        if self.head_rank is not None and self.head_rank != FULL:
            if isinstance(self.head_rank, str):
                raise InvalidOption(
                    where=where, name="head_rank", value=self.head_rank, reason=f"give an int >= 1, or {FULL!r}"
                )
            object.__setattr__(self, "head_rank", WholeNumber(1)(where, "head_rank", self.head_rank))
        if self.modules == ALL_LINEAR:
            return
        names = [self.modules] if isinstance(self.modules, str) else self.modules
        if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
            reason = f"give names of linears, such as ('q_proj', 'v_proj'), or {ALL_LINEAR!r}"
            raise InvalidOption(where=where, name="modules", value=self.modules, reason=reason)
        object.__setattr__(self, "modules", tuple(names))

    @property
    def fields(self) -> dict[str, Any]:
        """Plain values, by name."""
        return {item.name: getattr(self, item.name) for item in fields(self)}


def adapters_or_none(where: str, name: str, value: Any) -> Adapters | None:
    """``value`` itself, an option of ``where`` that must be an :class:`Adapters` or None.

    Raises:
        InvalidOption: it is neither.
    """
    if value is not None and not isinstance(value, Adapters):
        reason = "give speccompile.Adapters(count=...), or None"
        raise InvalidOption(where=where, name=name, value=value, reason=reason)
    return value

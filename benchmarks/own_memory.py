"""A drafter's memory of earlier requests for each of the ways that share a wrap."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from speccompile import Speculator


class OwnMemory:
    """The memory of one way: without it, a way drafts the text that another way of its wrap has just decoded."""

    def __init__(self, spec: Speculator) -> None:
        self._spec, self._memory = spec, spec.mode.memory
        self._beginning = self._copy()
        self._tables = self._beginning

    def _copy(self) -> dict[str, torch.Tensor]:
        return {name: self._spec.arena[name].clone() for name in self._memory.tables}

    def forget(self) -> None:
        """Begin as a new wrap begins."""
        self._tables = self._beginning

    @contextlib.contextmanager
    def used(self, *, keep: bool) -> Iterator[None]:
        """Draft from it in this context, while no other request runs.

        Args:
            keep: what the context adds is kept.
        """
        for name, table in self._tables.items():
            self._spec.arena[name].copy_(table)
        for name in self._memory.cursors:
            self._spec.arena[name].zero_()
        yield
        if keep:
            self._tables = self._copy()

"""Stages: the graph after each pass, printed as a Python file that runs."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from speccompile.errors import UnknownStage
from speccompile.graph.printing import callable_of, load_python, to_python, without_runner
from speccompile.graph.step_graph import StepGraph

#: The name of the first stage, the graph before any pass. No pass has this name.
CAPTURE = "capture"


@dataclass(frozen=True)
class Stage:
    """The graph after one pass.

    Args:
        name: the pass.
        tier: the name of the tier, for titles.
        seconds: the time of the pass.
        note: the pass's own summary.
        previous: the stage before; None for the first.
    """

    name: str
    tier: str
    graph: StepGraph = field(repr=False)
    seconds: float
    note: str = ""
    previous: Stage | None = field(default=None, repr=False)

    @cached_property
    def python(self) -> str:
        """The stage as a Python file that runs."""
        return to_python(self.graph, f"Stage {self.name!r} of {self.tier}.")

    @cached_property
    def call(self) -> Callable[..., Any]:
        """The printed file's ``step``."""
        return callable_of(self.python, f"<{self.tier}/{self.name}>")

    def make_inputs(self, seed: int = 0) -> list[Any]:
        """Random inputs for ``call``, from the printed file."""
        inputs: list[Any] = load_python(self.python, f"<{self.tier}/{self.name}>")["make_inputs"](seed)
        return inputs

    @property
    def op_counts(self) -> dict[str, int]:
        """The number of calls of each op or body, most frequent first."""
        return self.graph.op_counts()

    @property
    def diff(self) -> str:
        """A unified diff of the bodies and of ``step`` against the previous stage; empty for the first stage."""
        if self.previous is None:
            return ""
        before, after = (without_runner(stage.python).splitlines() for stage in (self.previous, self))
        return "\n".join(difflib.unified_diff(before, after, self.previous.name, self.name, lineterm="", n=1))


class Stages(Mapping[str, Stage]):
    """The stages of one tier, in running order, by name of the pass.

    Args:
        stages: the stages, or a function that builds them at the first use.
    """

    def __init__(self, stages: Iterable[Stage] | Callable[[], Stages]) -> None:
        self._given = stages

    @cached_property
    def _stages(self) -> dict[str, Stage]:
        stages = self._given().values() if callable(self._given) else self._given
        return {stage.name: stage for stage in stages}

    def __getitem__(self, name: str) -> Stage:
        if name not in self._stages:
            raise UnknownStage(name=name, tier=self.last.tier, available=", ".join(self._stages))
        return self._stages[name]

    def __contains__(self, name: object) -> bool:
        return name in self._stages

    def __iter__(self) -> Iterator[str]:
        return iter(self._stages)

    def __len__(self) -> int:
        return len(self._stages)

    def followed_by(self, later: Stages) -> Stages:
        """These stages and, after them, those of ``later`` that are not among them."""
        return Stages([*self._stages.values(), *(later[name] for name in later if name not in self)])

    @property
    def last(self) -> Stage:
        """The stage after the last pass."""
        return next(reversed(self._stages.values()))

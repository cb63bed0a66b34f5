"""One launch of a Triton kernel, as a value: it can be run, or compiled without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Launch:
    """One call ``kernel[grid](**arguments)``.

    Args:
        kernel: a ``@triton.jit`` function.
        grid: programs along each of up to three axes.
        arguments: every parameter of the kernel by name; ``None`` for an absent tensor.
        warps: warps a program. stages: depth of software pipelining.
        most_registers: of a thread; None leaves it to ptxas.
    """

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    warps: int = 4
    stages: int = 2
    most_registers: int | None = None

    @property
    def options(self) -> dict[str, int | None]:
        """Launch options by Triton's names."""
        return {"num_warps": self.warps, "num_stages": self.stages, "maxnreg": self.most_registers}

    def run(self) -> None:
        """On the current stream; under TRITON_INTERPRET=1 at once, on the CPU."""
        self.kernel[self.grid](**self.arguments, **self.options)


_noted: ContextVar[list[Launch] | None] = ContextVar("noted", default=None)


def launches_of(work: Callable[[], object]) -> list[Launch]:
    """Launches that ``work`` passes to :func:`run_all`. None of them runs, so its tensors may be fake."""
    token = _noted.set([])
    try:
        work()
        return _noted.get() or []
    finally:
        _noted.reset(token)


def run_all(launches: Sequence[Launch], like: torch.Tensor) -> None:
    """Run them in order on the device of ``like``; triton itself uses the current device."""
    noted = _noted.get()
    if noted is not None:
        noted.extend(launches)
        return
    with torch.cuda.device_of(like):
        for launch in launches:
            launch.run()

"""What stands in for CUDA where there is no GPU, and ops that no CUDA graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from speccompile.graph.printing import load_python
from speccompile.lowering.cuda.device import DeviceMemory, Graph
from speccompile.lowering.tier import Tier

REFUSED = "CUDA error: operation not permitted when stream is capturing"
SPOILED = "CUDA error: operation failed due to a previous error during capture"


@dataclass
class Replays:
    """Launches what was captured, by running it."""

    run: Callable[[], Any]
    launches: int = 0

    def replay(self) -> None:
        self.launches += 1
        self.run()


class StandIn:
    """A GraphDevice that notes what it is asked for. ``run`` is run where CUDA only notes it, too: nothing else can
    report what it would do."""

    #: The one that captures now.
    now: StandIn | None = None

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.graphs: list[Replays] = []
        self.spoiled = False
        self.pool: list[range] = [range(1 << 64)]
        # Every capture takes a MiB of the pool, and as much of the device beside it.
        self.size = 1 << 20

    def warm_up(self, run: Callable[[], Any]) -> None:
        self.asked.append("warm up")
        run()

    def rehearse(self, run: Callable[[], Any]) -> None:
        self.asked.append("rehearse")
        run()

    def capture(self, run: Callable[[], Any]) -> Graph:
        self.asked.append("capture")
        self.spoiled, StandIn.now = False, self
        try:
            run()
        finally:
            StandIn.now = None
        if self.spoiled:
            raise RuntimeError(SPOILED)
        self.graphs.append(Replays(run))
        return self.graphs[-1]

    def memory(self) -> DeviceMemory:
        taken = self.size * len(self.graphs)
        return DeviceMemory(pool=taken, free=(1 << 36) - 2 * taken)

    def pool_ranges(self) -> list[range]:
        return self.pool


_library = torch.library.Library("captures_test", "FRAGMENT")
_library.define("waits(Tensor tensor) -> Tensor")
_library.define("spoils(Tensor tensor) -> Tensor")


def _waits(tensor: torch.Tensor) -> torch.Tensor:
    """As an op does that calls ``.item()``."""
    if StandIn.now is not None:
        raise RuntimeError(REFUSED)
    return tensor * int(tensor.flatten()[0].item())


def _spoils(tensor: torch.Tensor) -> torch.Tensor:
    """As an op does that looks at no error of CUDA's: only the capture's end reports it."""
    if StandIn.now is not None:
        StandIn.now.spoiled = True
    return tensor.clone()


_library.impl("waits", _waits, "CompositeExplicitAutograd")
_library.impl("spoils", _spoils, "CompositeExplicitAutograd")


def with_line(tier: Tier, line: str, after: str) -> Tier:
    """The tier with one more line in its printed step, before what pass ``after`` put there."""
    mark = f"    # {after}\n"
    assert tier.step.source.count(mark) == 1
    source = tier.step.source.replace(mark, f"{mark}    {line}\n")
    namespace = load_python(source, f"<{tier.name}>")
    # Bodies are what they were lowered to.
    given = tier.executable.__globals__  # type: ignore[attr-defined]
    namespace.update({name: value for name, value in given.items() if name in namespace and name != "step"})
    return replace(tier, step=replace(tier.step, source=source), executable=namespace["step"])

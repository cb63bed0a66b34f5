"""Launches of the package's Triton kernels, compiled for an H100 as they would be there: by Triton's own JIT."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import triton

from benchmarks.without_gpu.hopper import triton_target
from speccompile.ops.triton.launch import Launch

#: Bytes of shared memory that one program can have.
MOST_SHARED = 227 << 10
#: Bytes of stack of a thread: ptxas may spill so much to have a second program on a multiprocessor. Versions differ.
MOST_STACK = 16


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel.

    Args:
        registers: of a thread.
        stack: bytes of local memory of a thread; more than 0 where registers are spilled.
        shared: bytes of shared memory of a program.
        ptx: the code before ptxas.
    """

    name: str
    warps: int
    registers: int
    stack: int
    shared: int
    ptx: str

    @property
    def fits(self) -> bool:
        """Whether it spills next to nothing and can be launched."""
        return self.stack <= MOST_STACK and self.shared <= MOST_SHARED

    def __str__(self) -> str:
        return f"{self.registers} registers, {self.stack} bytes of stack, {self.shared} bytes of shared memory"


_known: dict[str, Compiled] = {}


def compile_launch(launch: Launch) -> Compiled:
    """Compile what ``launch.run()`` would launch, with the same arguments. Its tensors may be on any device.

    Triton's JIT binds and specialises the arguments, so it refuses here what it would refuse on a GPU. A kernel is
    compiled once for each specialisation.
    """
    with triton_target():
        kernel = launch.kernel.run(grid=launch.grid, warmup=True, **launch.arguments, **launch.options)
    if kernel.hash not in _known:
        usage = resource_usage(kernel)
        _known[kernel.hash] = Compiled(
            launch.kernel.__name__,
            launch.warps,
            usage["REG"],
            usage["STACK"],
            kernel.metadata.shared,
            kernel.asm["ptx"],
        )
    return _known[kernel.hash]


def resource_usage(kernel: Any) -> dict[str, int]:
    """REG, STACK, SHARED and more of a compiled kernel, by cuobjdump, which Triton ships."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", output)}

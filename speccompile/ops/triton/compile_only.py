"""Compiling a launch for a GPU that is not there: whether it compiles, and what ptxas says about the result."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from speccompile.ops.triton.launch import Launch

HOPPER = 90

_TYPES = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int64: "*i64",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int8: "*i8",
    torch.uint8: "*u8",
    torch.bool: "*i1",
}


@dataclass(frozen=True)
class Compiled:
    """What a launch became.

    Args:
        registers: of a thread.
        stack: bytes of local memory a thread; more than 0 where registers are spilled.
        shared: bytes of shared memory a program.
        ptx: the code before ptxas.
    """

    name: str
    registers: int
    stack: int
    shared: int
    ptx: str


def compile_launch(launch: Launch, capability: int = HOPPER) -> Compiled:
    """Compile what ``launch.run()`` would run; its tensors may be on any device, ``meta`` too.

    Arguments are specialised as triton's launcher does it: None and 1 are constants, multiples of 16 are known to be,
    except where the kernel says ``do_not_specialize``.
    """
    signature: dict[str, str] = {}
    constants: dict[str, Any] = {}
    attributes = {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        special = not parameter.do_not_specialize
        kind = "constexpr" if parameter.is_constexpr else _kind(value, special)
        signature[parameter.name] = kind
        if kind == "constexpr":
            constants[parameter.name] = value
        elif special and (isinstance(value, torch.Tensor) or (isinstance(value, int) and value % 16 == 0)):
            attributes[index,] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constants, attributes)
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    usage = _resource_usage(kernel.asm["cubin"])
    return Compiled(launch.kernel.__name__, usage["REG"], usage["STACK"], kernel.metadata.shared, ptx=kernel.asm["ptx"])


def _kind(value: Any, special: bool) -> str:
    if value is None or (special and isinstance(value, int) and value == 1):
        return "constexpr"
    if isinstance(value, torch.Tensor):
        return _TYPES[value.dtype]
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


def _resource_usage(cubin: bytes) -> dict[str, int]:
    """By cuobjdump, which triton ships: REG, STACK, SHARED, ..."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(number) for name, number in re.findall(r"(\w+):(\d+)", output)}

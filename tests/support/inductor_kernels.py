"""The Triton kernels in a module that Inductor wrote for CUDA: their sources, and what they compile to."""

from __future__ import annotations

import ast
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import triton
from torch._inductor.runtime import triton_helpers

from benchmarks.without_gpu.compiled import resource_usage
from benchmarks.without_gpu.hopper import hopper

_KERNEL = re.compile(
    r"^(\w+) = async_compile\.triton\('\w+', '''(.*?)''', device_str='cuda'\)", re.MULTILINE | re.DOTALL
)
_MUTATED = re.compile(r"'mutated_arg_names': (\[.*?\])")


@dataclass(frozen=True)
class Written:
    """A kernel: ``mutated`` are the places of the arguments that it writes and that are inputs as well."""

    name: str
    source: str

    @property
    def parameters(self) -> list[str]:
        """In order."""
        found = next(node for node in ast.walk(ast.parse(self.source)) if isinstance(node, ast.FunctionDef))
        return [argument.arg for argument in found.args.args]

    @property
    def mutated(self) -> list[str]:
        """Parameters whose memory held an input's values before."""
        return ast.literal_eval(_MUTATED.search(self.source)[1])  # type: ignore[index]


def kernels_in(code: str) -> dict[str, Written]:
    """By name. Inductor first writes the module as text that tunes kernels, where they stand too."""
    return {name: Written(name, source) for name, source in _KERNEL.findall(code)}


_compiled: dict[str, dict[str, int]] = {}


def resources(kernel: Written, folder: Path) -> dict[str, int]:
    """What its first configuration takes of a GPU, ``{"REG": 32, "STACK": 0, ..., "shared": 0}``."""
    key = kernel.source.replace(kernel.name, "kernel")
    if key not in _compiled:
        path = folder / f"{kernel.name}.py"
        path.write_text(kernel.source)
        spec = importlib.util.spec_from_file_location(kernel.name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        compiled: list[Any] = []
        compile_source = triton.compile

        def note(*args: Any, **options: Any) -> Any:
            compiled.append(compile_source(*args, **options))
            return compiled[-1]

        to_gpu = patch.object(triton_helpers, "set_driver_to_gpu", lambda: None)
        with hopper(), to_gpu, patch.object(triton, "compile", note):
            spec.loader.exec_module(module)
            tuner: Any = getattr(module, kernel.name)
            tuner._precompile_config(tuner.configs[0])
        (binary,) = compiled
        assert ".target sm_90" in binary.asm["ptx"]
        _compiled[key] = resource_usage(binary) | {"shared": binary.metadata.shared}
    return _compiled[key]

"""What this package uses of torch's private modules. Only this file changes when a new torch moves or renames a part.

Tested with torch 2.11 to 2.15. ``tests/utils/test_torch_private.py`` fails if another file imports a private module of
torch.
"""

from __future__ import annotations

import contextlib
import importlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any, cast

import torch

# How Inductor's C++ is called from Python.
from torch._C import _aoti

# Shape functions in Python: those in C++ fail for some composite ops when sizes are symbolic.
from torch._dispatch.python import enable_python_dispatcher

# Whether modes of fakes remember results.
from torch._dynamo import config as dynamo_config

# Held by torch.compile while it sets flags for the whole process. An export sets the same flags.
from torch._dynamo.convert_frame import compile_lock

# The origin of a symbolic size that this package chooses. torch.export, the public way, chooses all sizes itself.
from torch._dynamo.source import ConstantSource

# Inductor over a flat graph. torch.compile, the public way, also traces, guards and recompiles.
from torch._inductor import CompiledArtifact, cpu_vec_isa
from torch._inductor import config as inductor_config
from torch._inductor import standalone_compile as _standalone_compile

# The compiler and the vector instructions that Inductor compiles with: bodies are linked with the C++ ops.
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import VecISA, invalid_vec_isa, pick_vec_isa

# What an artifact wraps: the compiled function and its source.
from torch._inductor.output_code import CompiledFxGraph

# The folder of Inductor's machine code, which packages hold a part of.
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

# The types of ``torch.ops.namespace.name`` and of its overloads have no public name.
from torch._ops import OpOverload, OpOverloadPacket

# Another fake of the same sizes, without a call of the mode.
from torch._subclasses.fake_impls import fast_detach

# Tensors without values. torch.export creates a mode per export; here one mode serves all graphs of the process.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

# The tracer's patches of ``nn.Module``, which are seen by all threads.
from torch.fx import _symbolic_trace as symbolic_trace

# A storage that is not kept alive; torch's own way to find one that another process shares.
from torch.multiprocessing.reductions import StorageWeakRef

# Nested structures, as torch.export returns them.
from torch.utils import _pytree as pytree

# Receives every call of an op. torch documents it where it is, in a private module.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    autograd_would_have_decomposed,
    is_traceable_wrapper_subclass,
)

# Calls ops within a mode that receives them, past it.
from torch.utils._python_dispatch import _disable_current_modes as without_modes

__all__ = [
    "FAKE_TENSOR_LOG",
    "INDUCTOR_LOG",
    "CompiledArtifact",
    "ConstantSource",
    "CppBuilder",
    "CppTorchOptions",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
    "StorageReference",
    "TorchDispatchMode",
    "VecISA",
    "all_gather_into",
    "autograd_would_have_decomposed",
    "check_size",
    "compile_lock",
    "compiled_function",
    "cpu_vec_isa",
    "decomposed",
    "direct_call",
    "dispatch_table",
    "enable_python_dispatcher",
    "end_pool",
    "fast_detach",
    "get_cpp_compiler",
    "import_inductor",
    "inductor_cache_dir",
    "inductor_config",
    "invalid_vec_isa",
    "is_composite",
    "is_traceable_wrapper_subclass",
    "op_schemas",
    "parse_to",
    "persistent_buffers",
    "pick_vec_isa",
    "pytree",
    "run_kernel",
    "set_timeout",
    "standalone_compile",
    "symbolic_trace",
    "without_fake_cache",
    "without_modes",
]

# A module has the same name, which type checkers take it for.
standalone_compile = cast(Callable[..., CompiledArtifact], _standalone_compile)

# The loggers of modules whose lines are dropped where they say nothing that a user can change.
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
INDUCTOR_LOG = "torch._inductor.ir"

# States a fact about sizes to torch.export, which documents it by this name.
check_size = torch._check

# The arguments of ``nn.Module.to``, read as it reads them.
parse_to = torch._C._nn._parse_to


def dispatch_table(op: str) -> str:
    """The kernels of an op by dispatch key, with the file that registered each. No public function returns it."""
    return str(torch._C._dispatch_dump(op))


def run_kernel(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The result of an op's own kernel for the device of its first tensor, past modes that would replace it."""
    first = next(item for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor))
    key = getattr(torch._C.DispatchKey, first.device.type.upper())
    return op.redispatch(torch._C.DispatchKeySet(key), *args, **kwargs)


def is_composite(op: OpOverload) -> bool:
    """Whether an op has a kernel that calls other ops, for all backends."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def end_pool(device: torch.device, pool: torch.cuda.MemPool) -> None:
    """End allocations to a pool of CUDA memory, which ``CUDAGraph.capture_end`` leaves open when it raises."""
    torch._C._cuda_endAllocateToPool(device.index, pool.id)
    torch._C._cuda_releasePool(device.index, pool.id)


@contextlib.contextmanager
def decomposed(ops: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """In this context Inductor compiles these functions in the place of calls of ``ops``."""
    # Imported late: it takes long.
    module = importlib.import_module("torch._inductor.decomposition")
    table = module.decompositions
    before = {op: table[op] for op in ops if op in table}
    table.update(ops)
    # Inductor compiles with a copy of the table, which it keeps from the first compilation of a process.
    module.fast_random_decomps.cache_clear()
    try:
        yield
    finally:
        for op in ops:
            del table[op]
        table.update(before)
        module.fast_random_decomps.cache_clear()


def import_inductor() -> None:
    """Import what Inductor compiles with. Not done above, since it takes a second."""
    importlib.import_module("torch._inductor.codecache")


def compiled_function(artifact: CompiledArtifact) -> tuple[Callable[[list[torch.Tensor]], Any], str]:
    """What Inductor compiled, without the functions that AOTAutograd wraps around it, and its source. No attribute
    leads there.

    Raises:
        RuntimeError: it is not found in this torch.
    """
    found: deque[Any] = deque([artifact])
    seen: set[int] = set()
    while found:
        value = found.popleft()
        if isinstance(value, CompiledFxGraph) and value.current_callable is not None:
            return value.current_callable, value.source_code
        if id(value) not in seen:
            seen.add(id(value))
            found += _held(value)
    raise RuntimeError(f"torch {torch.__version__} keeps compiled code where this version does not look for it")


def direct_call(compiled: Callable[[list[torch.Tensor]], Any]) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Calls the C++ of ``compiled`` without the Python function that Inductor writes around it.

    That function copies the list of inputs, which takes 5% of the time of a small model's layer. Where Inductor wrote
    no C++ around the kernels, ``compiled`` itself is called.
    """
    entry = getattr(compiled, "__globals__", {}).get("inductor_entry")
    if entry is None:
        return lambda inputs: compiled(list(inputs))
    to_handles, to_tensors = _aoti.unsafe_alloc_void_ptrs_from_tensors, _aoti.alloc_tensors_by_stealing_from_void_ptrs
    return lambda inputs: to_tensors(entry(to_handles(list(inputs))))


@contextlib.contextmanager
def without_fake_cache() -> Iterator[None]:
    """Modes of fakes that are created here remember no results. An export's never serve another one, since sizes of
    different exports are different symbols."""
    before = dynamo_config.fake_tensor_cache_enabled
    dynamo_config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        dynamo_config.fake_tensor_cache_enabled = before


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own buffers that are part of its state dict, by name. ``state_dict``, the public way, copies weights
    that a hook unpacks."""
    left_out = module._non_persistent_buffers_set
    return {name: value for name, value in module.named_buffers(recurse=False) if name not in left_out}


class StorageReference:
    """A storage that the reference does not keep alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage, None after its end."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return found


def _held(value: Any) -> list[Any]:
    """What functions close over, and the attributes of other objects."""
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, type | ModuleType):
        return []
    held = [*getattr(value, "__dict__", {}).values()]
    if isinstance(value, FunctionType):
        # A cell without a value equals a new one.
        held += [cell.cell_contents for cell in value.__closure__ or () if cell != CellType()]
    return held


def all_gather_into(result: torch.Tensor, part: torch.Tensor, group: Any) -> None:
    """Gather the ranks' flat tensors one after another into ``result``. Since torch 2.13 its old name warns."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(result, part, group=group)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Let later collectives of a process group end after ``timeout``."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def op_schemas(namespace: str) -> list[str]:
    """The schemas of the ops in ``namespace``, sorted."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith(f"{namespace}::"))

"""Private parts of torch that this package uses. Only this file changes when a new torch moves or renames a part.

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

# Inductor's calls of C++ from Python.
from torch._C import _aoti

# Shape functions in Python: those in C++ fail for some composite ops when sizes are symbolic.
from torch._dispatch.python import enable_python_dispatcher

# The setting whether modes of fakes remember results.
from torch._dynamo import config as dynamo_config

# The lock that torch.compile holds while it sets flags for the whole process. An export sets the same flags.
from torch._dynamo.convert_frame import compile_lock

# The origin of a symbolic size that this package chooses. torch.export, the public way, chooses all sizes itself.
from torch._dynamo.source import ConstantSource

# Inductor over a flat graph. torch.compile, the public way, also traces, guards and recompiles.
from torch._inductor import CompiledArtifact, cpu_vec_isa
from torch._inductor import config as inductor_config
from torch._inductor import standalone_compile as _standalone_compile

# The compiler and the vector instructions of Inductor: bodies are linked with the C++ ops.
from torch._inductor.cpp_builder import CppBuilder, CppTorchOptions, get_cpp_compiler
from torch._inductor.cpu_vec_isa import VecISA, invalid_vec_isa, pick_vec_isa

# The content of an artifact: the compiled function and its source.
from torch._inductor.output_code import CompiledFxGraph

# The folder of Inductor's machine code, which packages hold a part of.
from torch._inductor.runtime.cache_dir_utils import cache_dir as inductor_cache_dir

# The types of ``torch.ops.namespace.name`` and of its overloads have no public name.
from torch._ops import OpOverload, OpOverloadPacket

# Creates another fake of the same sizes, without a call of the mode.
from torch._subclasses.fake_impls import fast_detach

# Tensors without values. torch.export creates a mode per export; here one mode serves all graphs of the process.
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

# The tracer's patches of ``nn.Module``, which are seen by all threads.
from torch.fx import _symbolic_trace as symbolic_trace

# A reference that does not keep a storage alive; torch uses it to find a storage that another process shares.
from torch.multiprocessing.reductions import StorageWeakRef

# Nested structures, as torch.export returns them.
from torch.utils import _pytree as pytree

# Receives every call of an op. torch documents it, although its module is private.
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    autograd_would_have_decomposed,
    is_traceable_wrapper_subclass,
)

# Calls ops without the modes that would receive them.
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
    "argument_index",
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
    "has_modes",
    "import_inductor",
    "inductor_cache_dir",
    "inductor_config",
    "invalid_vec_isa",
    "is_composite",
    "is_explicit_composite",
    "is_traceable_wrapper_subclass",
    "op_schemas",
    "parse_schema",
    "parse_to",
    "persistent_buffers",
    "pick_vec_isa",
    "pytree",
    "set_timeout",
    "standalone_compile",
    "symbolic_trace",
    "without_fake_cache",
    "without_modes",
]

# The cast is needed, since type checkers confuse this name with the module of the same name.
standalone_compile = cast(Callable[..., CompiledArtifact], _standalone_compile)

# Loggers of modules. Lines that a user cannot act on are dropped.
FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"
INDUCTOR_LOG = "torch._inductor.ir"

# States a fact about sizes to torch.export, which documents it by this name.
check_size = torch._check

# Reads the arguments of ``nn.Module.to``.
parse_to = torch._C._nn._parse_to


def dispatch_table(op: str) -> str:
    """Return the kernels of an op by dispatch key, with the file that registered each. No public function does."""
    return str(torch._C._dispatch_dump(op))


def has_modes() -> bool:
    """Whether the calling thread has a mode that receives every op."""
    depth: int = torch._C._len_torch_dispatch_stack()
    return depth > 0


def argument_index(op: OpOverload, name: str) -> int:
    """The index of the argument ``name`` of ``op``."""
    return [argument.name for argument in op._schema.arguments].index(name)


def is_composite(op: OpOverload) -> bool:
    """Whether an op has a kernel that calls other ops, for all backends."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd))


def is_explicit_composite(op: OpOverload) -> bool:
    """Whether an op has a kernel for all backends that autograd does not enter: a reference in PyTorch."""
    return bool(op.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeExplicitAutograd))


def end_pool(device: torch.device, pool: torch.cuda.MemPool) -> None:
    """End allocations to a pool of CUDA memory, which ``CUDAGraph.capture_end`` leaves open when it raises."""
    torch._C._cuda_endAllocateToPool(device.index, pool.id)
    torch._C._cuda_releasePool(device.index, pool.id)


@contextlib.contextmanager
def decomposed(ops: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """Let Inductor compile these functions instead of calls of ``ops`` in this context."""
    # Imported late, since the import is slow.
    module = importlib.import_module("torch._inductor.decomposition")
    table = module.decompositions
    before = {op: table[op] for op in ops if op in table}
    table.update(ops)
    # Inductor compiles with a copy of the table, which it caches at the first compilation of a process.
    module.fast_random_decomps.cache_clear()
    try:
        yield
    finally:
        for op in ops:
            del table[op]
        table.update(before)
        module.fast_random_decomps.cache_clear()


def import_inductor() -> None:
    """Import Inductor's compiler. It is not imported above, since that needs a second."""
    importlib.import_module("torch._inductor.codecache")


def compiled_function(artifact: CompiledArtifact) -> tuple[Callable[[list[torch.Tensor]], Any], str]:
    """Return Inductor's compiled function and its source, without the functions that AOTAutograd wraps around it. No
    attribute refers to it directly, so it is searched.

    Raises:
        RuntimeError: it is not found in this version of torch.
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
    raise RuntimeError(
        f"torch {torch.__version__} keeps compiled code at a place that this version of speccompile does not know: "
        "use torch 2.11 to 2.15"
    )


def direct_call(compiled: Callable[[list[torch.Tensor]], Any]) -> Callable[[Sequence[torch.Tensor]], Any]:
    """Return a function that calls the C++ of ``compiled`` without the Python function that Inductor writes around it.

    That function copies the list of inputs, which needs 5% of the time of a small model's layer. If Inductor wrote no
    C++ around the kernels, the result calls ``compiled``.
    """
    entry = getattr(compiled, "__globals__", {}).get("inductor_entry")
    if entry is None:
        return lambda inputs: compiled(list(inputs))
    to_handles, to_tensors = _aoti.unsafe_alloc_void_ptrs_from_tensors, _aoti.alloc_tensors_by_stealing_from_void_ptrs
    return lambda inputs: to_tensors(entry(to_handles(list(inputs))))


@contextlib.contextmanager
def without_fake_cache() -> Iterator[None]:
    """Create modes of fakes that remember no results in this context. The results of one export never serve another,
    since sizes of different exports are different symbols."""
    before = dynamo_config.fake_tensor_cache_enabled
    dynamo_config.fake_tensor_cache_enabled = False
    try:
        yield
    finally:
        dynamo_config.fake_tensor_cache_enabled = before


def persistent_buffers(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a module's own buffers that are part of its state dict, by name. ``state_dict``, the public way, would
    copy weights that a hook unpacks."""
    left_out = module._non_persistent_buffers_set
    return {name: value for name, value in module.named_buffers(recurse=False) if name not in left_out}


class StorageReference:
    """A reference to a storage that does not keep it alive."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._reference = StorageWeakRef(storage)

    def storage(self) -> torch.UntypedStorage | None:
        """The storage; None if it was released."""
        found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(self._reference.cdata)
        return found


def _held(value: Any) -> list[Any]:
    """Return the objects that a function closes over, and the attributes of other objects."""
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
    """Gather the ranks' flat tensors one after another into ``result``. The old name warns since torch 2.13."""
    gather = getattr(torch.distributed, "all_gather_single", None) or torch.distributed.all_gather_into_tensor
    gather(result, part, group=group)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """Set the timeout of later collectives of a process group."""
    torch.distributed.distributed_c10d._set_pg_timeout(timeout, group)


def parse_schema(schema: str) -> torch.FunctionSchema:
    """Return the parsed ``schema``, ``"NAME(Tensor x) -> Tensor"``. Raises RuntimeError if torch cannot read it."""
    return torch._C.parse_schema(schema)


def op_schemas(namespace: str) -> list[str]:
    """Return the schemas of the ops in ``namespace``, sorted."""
    schemas = torch._C._jit_get_all_schemas()
    return sorted(str(schema) for schema in schemas if schema.name.startswith(f"{namespace}::"))

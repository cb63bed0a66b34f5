"""Compiles an outlined body once, for all layers, tiers, prefill and arena sizes.

The recipe (own ShapeEnv, duck-shaped fakes, ``dynamic_shapes="from_graph"``) keeps rows, width,
slots and cache length symbolic, rows and width from 1 upwards;
KV writes stay in place. Keys and values need example storages of their own, or AOTAutograd takes them for aliases.
"""

from __future__ import annotations

import contextlib
import logging
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from torch import fx
from torch.autograd import profiler
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from speccompile.errors import LoweringError, error_line
from speccompile.graph.body import Body, size_of
from speccompile.graph.state import primes_clear_of
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.object_code import install, machine_code
from speccompile.ops.cpu.library import load_cpu_ops
from speccompile.ops.cpu.shims import shims
from speccompile.utils.build_lock import one_build
from speccompile.utils.machine import machine
from speccompile.utils.progress import task
from speccompile.utils.sources import sources
from speccompile.utils.storage import CacheFolder, digest
from speccompile.utils.torch_private import (
    INDUCTOR_LOG,
    CompiledArtifact,
    ConstantSource,
    FakeTensorMode,
    enable_python_dispatcher,
    inductor_code_cache,
    inductor_config,
    pick_vec_isa,
    standalone_compile,
)

aten = torch.ops.aten

BodyFunction = Callable[..., torch.Tensor]

ARTIFACTS, MACHINE_CODE = "compiled", "machine_code"


@dataclass(frozen=True)
class _Kept:
    """``call`` may lead past the artifact, which takes its module apart when it goes."""

    artifact: CompiledArtifact
    call: BodyFunction


# By what was compiled: wrapping the same model again in one process compiles nothing.
_artifacts: dict[str, _Kept] = {}

# By the same names, the Python module that Inductor wrote, and its text. It calls the kernels; on a CPU C++ in it does.
_modules: dict[str, ModuleType] = {}
_code: dict[str, str] = {}

# What other processes compiled, by the same names, until it is needed.
_brought: dict[str, bytes] = {}


@one_build()
def compiled_bodies(graph: StepGraph) -> dict[str, BodyFunction]:
    """A compiled function for each body of ``graph``, by the body's name."""
    return {name: _compiled(body, graph.device) for name, body in graph.bodies.items()}


def compiled_code(graph: StepGraph) -> dict[str, str]:
    """What calls the kernels of each body of ``graph`` that this process has compiled or loaded."""
    names = {name: artifact_name(body, graph.device) for name, body in graph.bodies.items()}
    return {name: _code[artifact] for name, artifact in names.items() if artifact in _code}


def compiled_files(graph: StepGraph) -> dict[str, bytes]:
    """What :func:`bring` takes in another process, by name: artifacts, and their machine code.

    Raises:
        LoweringError: Inductor leaves nothing to save, or cannot compile.
    """
    found = {artifact_name(body, graph.device): body for body in graph.bodies.values()}
    artifacts = {
        name: CacheFolder().read(name) or _file_of(_compile(body, graph.device), body) for name, body in found.items()
    }
    return artifacts | {f"{MACHINE_CODE}/{name}": data for name, data in machine_code([*artifacts.values()]).items()}


def use_package_objects(files: Mapping[str, bytes]) -> None:
    """Make known what another process compiled: those of ``files`` that :func:`compiled_files` made."""
    parts = [(*name.partition("/")[::2], data) for name, data in files.items()]
    install({name: data for folder, name, data in parts if folder == MACHINE_CODE})
    _brought.update({name: data for name, data in files.items() if name.partition("/")[0] == ARTIFACTS})


def artifact_name(body: Body, device: torch.device) -> str:
    parts = [sources(), torch.__version__, str(torch.version.git_version), repr(machine(device)), body.module.code]
    parts += [repr(body.dims), repr(body.dtypes), repr(device)]
    return f"{ARTIFACTS}/{digest(chr(10).join(parts))[:32]}.bin"


def _compiled(body: Body, device: torch.device) -> BodyFunction:
    name = artifact_name(body, device)
    if name not in _artifacts:
        data = _brought.pop(name, None) or CacheFolder().read(name)
        with _noting_module(name, device):
            artifact = _made(name, body, device) if data is None else _read(name, data)
        call = _direct(_modules[name], body.name) if _is_direct(name, device) else _function(artifact)
        _artifacts[name] = _Kept(artifact, call)
    return _artifacts[name].call


@contextlib.contextmanager
def _noting_module(name: str, device: torch.device) -> Iterator[None]:
    """Keep the module that Inductor loads inside of the block, compiled just now or before. On a CPU it is linked with
    the C++ ops, which are waited for then.
    """
    cache = inductor_code_cache().PyCodeCache
    load, owner = cache.load_by_key_path, threading.get_ident()

    def noted(*arguments: Any, **options: Any) -> ModuleType:
        if device.type == "cpu" and threading.get_ident() == owner:
            # Not sooner: they are built while Inductor writes the module.
            load_cpu_ops()
        module: ModuleType = load(*arguments, **options)
        if threading.get_ident() != owner:
            # Another thread's torch.compile.
            return module
        # A Triton kernel's module comes this way too, and calls nothing.
        if hasattr(module, "call") and module.__file__ is not None:
            _modules[name], _code[name] = module, Path(module.__file__).read_text()
        return module

    cache.load_by_key_path = noted
    try:
        yield
    finally:
        cache.load_by_key_path = load


def _made(name: str, body: Body, device: torch.device) -> CompiledArtifact:
    with task(f"compile {body.name} for {len(body.layers)} layers"):
        artifact = _compile(body, device)
    if _is_saveable(artifact):
        CacheFolder().write(name, _file_of(artifact, body))
    return artifact


def _is_direct(name: str, device: torch.device) -> bool:
    # On a GPU the wrappers also align inputs, and a CUDA graph pays for them once.
    return device.type == "cpu" and name in _modules


def _direct(module: ModuleType, name: str) -> BodyFunction:
    """Past AOTAutograd's wrappers, which are about gradients, aliases and subclasses: a body has none of them, and they
    take a tenth of what a layer of a small model takes. They would also record the call while a profiler runs.
    """
    call_module = module.call
    recorded_as = f"speccompile::{name}"

    def call(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        # torch sets this flag while a profiler runs. Reading it takes nanoseconds, an unused record microseconds.
        if profiler._is_profiler_enabled:
            with profiler.record_function(recorded_as):
                result = call_module(list(inputs))[0]
        else:
            result = call_module(list(inputs))[0]
        return result

    return call


def _function(artifact: CompiledArtifact) -> BodyFunction:
    def call(*inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = artifact(*inputs)[0]
        return result

    return call


def _is_saveable(artifact: CompiledArtifact) -> bool:
    # Every kind of artifact that standalone_compile returns here has it, though their base does not declare it.
    saveable: bool = cast(Any, artifact).is_saveable()
    return saveable


def _file_of(artifact: CompiledArtifact, body: Body) -> bytes:
    if not _is_saveable(artifact):
        raise LoweringError(
            f"Inductor keeps nothing of {body.name!r} that could be saved. Its caches are off: unset "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES, TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE"
        )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        artifact.save(path=str(path), format="binary")
        return path.read_bytes()


def _read(name: str, data: bytes) -> CompiledArtifact:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "artifact")
        path.write_bytes(data)
        try:
            return CompiledArtifact.load(path=str(path), format="binary")
        except Exception as error:
            raise LoweringError(
                f"Inductor could not load what was compiled before ({error_line(error)}). Delete {name} in the cache "
                "folder, or wrap the model instead of loading a package, to compile again"
            ) from error


def _compile(body: Body, device: torch.device) -> CompiledArtifact:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    examples = _example_sizes(body)
    fakes: list[Any] = []
    for index, (dims, dtype) in enumerate(zip(body.dims, body.dtypes, strict=True)):
        shape = [size_of(size, examples) for size in dims]
        dynamic = [DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in dims]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        real = torch.empty(shape, dtype=dtype, device=device)
        fakes.append(mode.from_tensor(real, symbolic_context=context, source=ConstantSource(f"input_{index}")))
    module = _returning_tuple(body)
    # In C++ some composite ops (linear before torch 2.12) cannot work on symbolic sizes.
    with mode, torch.no_grad(), enable_python_dispatcher():
        (result,) = module(*fakes)
    (returned,) = cast(Any, module.graph.output_node().args[0])
    returned.meta["val"] = returned.meta["example_value"] = result
    try:
        # What comes in are arena tensors and captured weights, whose sizes are known; asking for them again at every
        # layer of every step takes longer than some kernels.
        options: dict[str, Any] = {"size_asserts": False}
        if device.type == "cpu":
            # Python between the kernels takes longer than some of them, too.
            options |= {"cpp_wrapper": True, "aot_inductor.custom_ops_to_c_shims": shims()}
            # Inductor's caches tell settings apart, but not the vectors that code was written for: what ran with others
            # on this machine would be taken, and write beside its memory.
            # OpenMP's threads are as many as the step asks for when it runs.
            options["cpp.dynamic_threads"] = True
            options["cpp.simdlen"] = pick_vec_isa().bit_width()
        with torch.no_grad(), inductor_config.patch(options), _without_hints():
            return standalone_compile(module, fakes, dynamic_shapes="from_graph")
    except Exception as error:
        raise LoweringError(f"Inductor could not compile {body.name!r}: {error}") from error


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Inductor tells which of torch's ops have no C function: nothing that a user could change."""

    def is_none(record: logging.LogRecord) -> bool:
        return "is missing a c-shim" not in record.getMessage()

    log = logging.getLogger(INDUCTOR_LOG)
    log.addFilter(is_none)
    try:
        yield
    finally:
        log.removeFilter(is_none)


def _example_sizes(body: Body) -> dict[str, int]:
    """Primes for B, T, N and S that divide no fixed size of the body, so that duck shaping tells all sizes apart."""
    fixed = {size for dims in body.dims for size in dims if isinstance(size, int)}
    return dict(zip(("B", "T", "N", "S"), primes_clear_of(fixed), strict=False))


def _returning_tuple(body: Body) -> fx.GraphModule:
    graph = fx.Graph()
    result = graph.graph_copy(body.module.graph, {})
    graph.output((result,))
    for node in graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _split_baddbmm(graph, node)
    for node in graph.nodes:
        node.meta.clear()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=body.name)


def _split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    """Its shape function fails on symbolic sizes (torch 2.13); Inductor fuses the parts again."""
    added, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(aten.bmm.default, (left, right))
        scaled = graph.call_function(aten.mul.Scalar, (product, node.kwargs.get("alpha", 1)))
        kept = graph.call_function(aten.mul.Scalar, (added, node.kwargs.get("beta", 1)))
        total = graph.call_function(aten.add.Tensor, (kept, scaled))
    node.replace_all_uses_with(total)
    graph.erase_node(node)

"""Compilation of an outlined body, once for all layers, tiers, prefill and arena sizes.

The recipe (a separate ShapeEnv, duck-shaped fakes, ``dynamic_shapes="from_graph"``) keeps rows, width, slots and cache
length symbolic, rows and width from 1 upwards. KV is written in place. Keys and values need separate example storages,
or AOTAutograd would treat them as aliases.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx
from torch.autograd import profiler
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from speccompile.errors import LoweringError, error_line
from speccompile.graph.body import Body, size_of
from speccompile.graph.state import primes_clear_of
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.object_code import machine_code
from speccompile.ops import lora
from speccompile.ops.cpu.shims import shims
from speccompile.utils.build_lock import one_build
from speccompile.utils.devices import traits_of
from speccompile.utils.inductor_folder import (
    VARIABLE,
    make_inductor_folder_writable,
    replace_inductor_folder_after,
    replaced_inductor_folder,
    warn_of_lost_kernels,
    write_error,
)
from speccompile.utils.machine import machine
from speccompile.utils.progress import task
from speccompile.utils.sources import sources
from speccompile.utils.storage import Storage, digest
from speccompile.utils.torch_private import (
    INDUCTOR_LOG,
    CompiledArtifact,
    ConstantSource,
    FakeTensorMode,
    OpOverload,
    compiled_function,
    decomposed,
    direct_call,
    enable_python_dispatcher,
    inductor_cache_dir,
    inductor_config,
    pick_vec_isa,
    standalone_compile,
)
from speccompile.utils.tracer_isolation import traced_alone

aten = torch.ops.aten

#: Returns one tensor, or a tuple of several, like the body.
BodyFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]

ARTIFACTS = "compiled"

# Packages whose code decides how a body is compiled. The body itself is also in its key.
PACKAGES = ("graph", "lowering", "ops", "utils")


@dataclass(frozen=True)
class _Loaded:
    """A loaded artifact. ``call`` may use its module directly; the artifact must stay alive meanwhile. ``code`` calls
    the kernels."""

    artifact: CompiledArtifact
    call: BodyFunction
    code: str


@dataclass(frozen=True)
class CompiledBodies:
    """The compiled bodies of one wrap, by artifact name. A body that ``storage`` has is not compiled again."""

    storage: Storage
    _loaded: dict[str, _Loaded] = field(default_factory=dict, repr=False)

    def functions(self, graph: StepGraph) -> dict[str, BodyFunction]:
        """Return a compiled function for each body of ``graph``, by the body's name. It can be called as soon as the
        body's C++ ops are loaded.

        Raises:
            LoweringError: Inductor cannot compile a body, or cannot load its stored code.
        """
        with one_build():
            make_inductor_folder_writable()
            functions = {name: self._load(body, graph.device).call for name, body in graph.bodies.items()}
            warn_of_lost_kernels()
            return functions

    def code(self, graph: StepGraph) -> dict[str, str]:
        """Return the source that calls the kernels, for each body of ``graph`` that :meth:`functions` has returned."""
        names = {name: artifact_name(body, graph.device) for name, body in graph.bodies.items()}
        return {name: self._loaded[artifact].code for name, artifact in names.items() if artifact in self._loaded}

    def files(self, graph: StepGraph) -> dict[str, bytes]:
        """Return the files of a package for the bodies of ``graph``, by name: artifacts, and their machine code.

        Raises:
            LoweringError: Inductor's caches are off, so nothing can be saved, or it cannot compile.
        """
        found = {artifact_name(body, graph.device): body for body in graph.bodies.values()}
        artifacts = {
            name: self.storage.read(name) or _file_of(_compile(body, graph.device), body)
            for name, body in found.items()
        }
        return artifacts | machine_code([*artifacts.values()])

    def _load(self, body: Body, device: torch.device) -> _Loaded:
        name = artifact_name(body, device)
        if name not in self._loaded:
            data = self.storage.read(name)
            artifact = self._make(name, body, device) if data is None else _again_elsewhere(lambda: _read(name, data))
            compiled, source = compiled_function(artifact)
            # On a GPU AOTAutograd's wrappers also align inputs. A CUDA graph pays for them only once.
            call = _direct(compiled, body) if traits_of(device).host_memory else _function(artifact, body)
            self._loaded[name] = _Loaded(artifact, call, source)
        return self._loaded[name]

    def _make(self, name: str, body: Body, device: torch.device) -> CompiledArtifact:
        with task(f"compile {body.name}" + f" for {len(body.layers)} layers" * bool(body.layers)):
            artifact = _again_elsewhere(lambda: _compile(body, device))
        if _is_saveable(artifact):
            self.storage.write(name, _file_of(artifact, body))
        return artifact


def _again_elsewhere(make: Callable[[], CompiledArtifact]) -> CompiledArtifact:
    """Call ``make``. Call it again if Inductor's folder could not be written and was replaced."""
    try:
        return make()
    except LoweringError as error:
        if not replace_inductor_folder_after(error):
            raise
        return make()


def artifact_name(body: Body, device: torch.device) -> str:
    parts = [
        sources(*PACKAGES),
        torch.__version__,
        str(torch.version.git_version),
        repr(machine(device)),
        body.module.code,
    ]
    parts += [repr(body.dims), repr(body.dtypes), repr(device)]
    return f"{ARTIFACTS}/{digest(chr(10).join(parts))[:32]}.bin"


def _direct(compiled: Callable[[list[torch.Tensor]], Any], body: Body) -> BodyFunction:
    """Return a function that calls the compiled code without AOTAutograd's wrappers.

    The wrappers handle gradients, aliases and subclasses, which a body does not have. They need a tenth of the time of
    a small model's layer. They would also record the call while a profiler runs, so ``call`` does that here.
    """
    recorded_as, run, result = f"speccompile::{body.name}", direct_call(compiled), _selected(body)

    def call(*inputs: torch.Tensor) -> Any:
        # torch sets this flag while a profiler runs. Reading it needs nanoseconds, an unused record microseconds.
        if profiler._is_profiler_enabled:
            with profiler.record_function(recorded_as):
                return result(run(inputs))
        return result(run(inputs))

    return call


def _function(artifact: CompiledArtifact, body: Body) -> BodyFunction:
    result = _selected(body)

    def call(*inputs: torch.Tensor) -> Any:
        return result(artifact(*inputs))

    return call


def _selected(body: Body) -> Callable[[Any], Any]:
    """Return a function from an artifact's result to the body's result."""
    return operator.itemgetter(0) if len(body.results) == 1 else tuple


def _is_saveable(artifact: CompiledArtifact) -> bool:
    # All artifacts that standalone_compile returns here have this method, though their base class does not declare it.
    saveable: bool = cast(Any, artifact).is_saveable()
    return saveable


def _file_of(artifact: CompiledArtifact, body: Body) -> bytes:
    if not _is_saveable(artifact):
        raise LoweringError(
            f"Inductor has nothing of {body.name!r} that can be saved, since its caches are off: unset "
            "TORCHINDUCTOR_FORCE_DISABLE_CACHES, TORCHINDUCTOR_FX_GRAPH_CACHE and TORCHINDUCTOR_AUTOGRAD_CACHE",
            unsaved=body.name,
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
            advice = f"Delete {name} in the cache folder, or wrap the model instead of loading a package"
            if write_error(error):
                advice = _advice_of_folder()
            raise LoweringError(
                f"Inductor could not load code that was compiled before ({error_line(error)}). {advice}",
                file=name,
                reason=error_line(error),
            ) from error


def _advice_of_folder() -> str:
    folder = replaced_inductor_folder() or inductor_cache_dir()
    return f"Set {VARIABLE} to a folder that can be written: {folder} cannot be written"


def _compile(body: Body, device: torch.device) -> CompiledArtifact:
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fakes = _example_inputs(body, device, mode)
    module = _returning_tuple(body)
    # In C++ some composite ops (linear before torch 2.12) do not accept symbolic sizes.
    with mode, torch.no_grad(), enable_python_dispatcher():
        results = module(*fakes)
    for returned, result in zip(cast(Any, module.graph.output_node().args[0]), results, strict=True):
        returned.meta["val"] = returned.meta["example_value"] = result
    try:
        in_parts: dict[OpOverload, Callable[..., Any]] = {}
        if traits_of(device).cpp_ops:
            # The op for adapters is decomposed: C++ crashes when it calls a Python op that returns a list (torch 2.13).
            in_parts = {torch.ops.speccompile.lora.default: lora.reference}
        with (
            torch.no_grad(),
            inductor_config.patch(settings(device)),
            decomposed(in_parts),
            _without_hints(),
            traced_alone(),
        ):
            return standalone_compile(module, fakes, dynamic_shapes="from_graph")
    except Exception as error:
        message = f"Inductor could not compile {body.name!r}: {error}"
        if write_error(error):
            message += f". {_advice_of_folder()}"
        raise LoweringError(message, body=body.name, reason=error_line(error)) from error


def settings(device: torch.device) -> dict[str, Any]:
    """Return Inductor's settings for bodies on ``device`` that differ from its defaults."""
    traits = traits_of(device)
    # Inputs are arena tensors and captured weights, whose sizes are known. Checking them again at every layer of every
    # step needs more time than some kernels.
    options: dict[str, Any] = {"size_asserts": False}
    if traits.cpp_ops:
        # Python between the kernels also needs more time than some kernels.
        options |= {"cpp_wrapper": True, "aot_inductor.custom_ops_to_c_shims": shims()}
        # Inductor's cache key has the settings, but not the vector width that code was written for. Without this entry
        # it would load code for another width of this machine, which would write out of bounds.
        # The number of OpenMP threads is read when the step runs.
        options["cpp.dynamic_threads"] = True
        options["cpp.simdlen"] = pick_vec_isa().bit_width()
    if traits.triton_ops:
        # One launch for kernels that do not depend on one another: the rotary embedding of queries, and that of keys
        # with the write of KV, which have other sizes.
        options["combo_kernels"] = True
        # A padded product copies its weight in every step, if a measurement at compile time prefers that.
        options["shape_padding"] = False
        # Otherwise a measurement at the first launch chooses the order of sums of a short reduction, and two builds
        # would differ in bits.
        options["deterministic"] = True
    return options


@contextlib.contextmanager
def _without_hints() -> Iterator[None]:
    """Silence Inductor's log of torch ops without a C function, which a user cannot change."""

    def is_none(record: logging.LogRecord) -> bool:
        return "is missing a c-shim" not in record.getMessage()

    log = logging.getLogger(INDUCTOR_LOG)
    log.addFilter(is_none)
    try:
        yield
    finally:
        log.removeFilter(is_none)


def _example_inputs(body: Body, device: torch.device, mode: FakeTensorMode) -> list[Any]:
    """Create fakes with a symbol for each named size. The device need not exist: nothing is allocated on it."""
    examples = _example_sizes(body)
    fakes = []
    for index, (dims, dtype) in enumerate(zip(body.dims, body.dtypes, strict=True)):
        shape = [size_of(size, examples) for size in dims]
        dynamic = [DimDynamic.DUCK if isinstance(size, str) else DimDynamic.STATIC for size in dims]
        context: Any = StatelessSymbolicContext(dynamic_sizes=dynamic)
        example = torch.empty(shape, dtype=dtype, device="meta")
        sizes = mode.from_tensor(example, symbolic_context=context, source=ConstantSource(f"input_{index}")).shape
        with mode:
            fakes.append(torch.empty(sizes, dtype=dtype, device=device))
    return fakes


def _example_sizes(body: Body) -> dict[str, int]:
    """Return primes for B, T, N and S that divide no fixed size of the body. Duck shaping then distinguishes all
    sizes."""
    fixed = {size for dims in body.dims for size in dims if isinstance(size, int)}
    return dict(zip(("B", "T", "N", "S"), primes_clear_of(fixed), strict=False))


def _returning_tuple(body: Body) -> fx.GraphModule:
    graph = fx.Graph()
    result: Any = graph.graph_copy(body.module.graph, {})
    graph.output(result if isinstance(result, tuple) else (result,))
    for node in graph.find_nodes(op="call_function", target=aten.baddbmm.default):
        _split_baddbmm(graph, node)
    for node in graph.nodes:
        node.meta.clear()
    return fx.GraphModule(torch.nn.Module(), graph, class_name=body.name)


def _split_baddbmm(graph: fx.Graph, node: fx.Node) -> None:
    """Split ``baddbmm`` into parts, since its shape function fails on symbolic sizes (torch 2.13). Inductor fuses the
    parts again."""
    added, left, right = node.args
    with graph.inserting_before(node):
        product = graph.call_function(aten.bmm.default, (left, right))
        scaled = graph.call_function(aten.mul.Scalar, (product, node.kwargs.get("alpha", 1)))
        kept = graph.call_function(aten.mul.Scalar, (added, node.kwargs.get("beta", 1)))
        total = graph.call_function(aten.add.Tensor, (kept, scaled))
    node.replace_all_uses_with(total)
    graph.erase_node(node)

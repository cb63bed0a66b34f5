"""Backends by name. A backend lowers a verified step graph to a callable of its placeholders."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NoReturn, Protocol, Self, TypeVar

import torch

from speccompile.errors import (
    BackendFailed,
    Degraded,
    InvalidOption,
    NeedsCuda,
    SpecCompileError,
    UnknownBackend,
    error_line,
)
from speccompile.graph.arena import Arena
from speccompile.graph.printing import callable_of, load_python, to_python
from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.model_info import ModelInfo
from speccompile.lowering.compiled_bodies import CompiledBodies
from speccompile.lowering.cuda.captures import Captures, Weights
from speccompile.lowering.cuda.device import CudaDevice
from speccompile.lowering.kernels import STOCK, Kernels, choose_kernels
from speccompile.lowering.recorded_step import RecordableStep, runs_recorded_ops
from speccompile.utils.devices import traits_of
from speccompile.utils.instruction_sets import instruction_sets
from speccompile.utils.storage import CacheFolder, Storage
from speccompile.utils.warn import warn_caller

T = TypeVar("T")


class Backend(Protocol):
    """An object that lowers step graphs.

    ``reason`` states why the backend was chosen, for ``explain()``. ``devices`` are the types of device that it runs
    on. Derive your own backend from :class:`Eager`, which has a default for each method, or from :class:`Inductor`.
    """

    devices: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name for ``wrap(backend=...)`` and ``explain()``."""

    @property
    def reason(self) -> str:
        """The reason why this backend was chosen, for ``explain()``."""

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """Return the kernels that steps call."""

    def with_storage(self, storage: Storage) -> Backend:
        """Return this backend for one build, which reads compiled code from ``storage`` and writes it there."""

    def prepare(self, device: torch.device) -> None:
        """Start work that :meth:`lower` would wait for. It runs beside other work."""

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Lower the last stage of a step to a function of the values of the graph's ports, in order. ``title`` names
        the step."""

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Lower the printed step ``source``, which calls bodies of ``graph``."""

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """Return the files, by name, that a package keeps of the compiled bodies of ``graph``."""

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """Return an object that captures the bound tiers of one wrap; None if they run without capture.

        ``weights`` returns the model's own weights, by path, at the time of the call.
        """

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """Return, for each compiled body of ``graph``, the module that calls its kernels. Other bodies are absent."""


@dataclass(frozen=True)
class Eager:
    """The printed step, executed op by op. It is the reference that every other backend is compared with."""

    reason: str
    name: str = "eager"

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """Return torch's own kernels."""
        return STOCK

    def with_storage(self, storage: Storage) -> Self:
        """Return this backend: it compiles no code that needs storage."""
        return self

    def prepare(self, device: torch.device) -> None:
        """Do nothing: this backend has no slow preparation."""

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Print the graph and load the printed file."""
        return self.load(to_python(graph, title), graph, title)

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Return the function ``step`` of the printed file."""
        return callable_of(source, f"<{title}>")

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """Return no files, since nothing is compiled."""
        return {}

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """Return None: this backend has no CUDA graphs."""
        return None

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """Return no code, since nothing is compiled."""
        return {}


@dataclass(frozen=True)
class Inductor:
    """The printed step with every outlined body replaced by its compiled code.

    Ops outside of the bodies run uncompiled. On a CPU a prototype that compiled them was not faster, and small steps
    are recorded (:mod:`speccompile.lowering.recorded_step`). On CUDA few of them are left
    (:class:`speccompile.passes.target.outline_ends.OutlineEnds`).
    """

    reason: str
    name: str = "inductor"
    bodies: CompiledBodies = field(default_factory=lambda: CompiledBodies(CacheFolder()), repr=False, compare=False)

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """Return the kernels for a model on its device."""
        return choose_kernels(info)

    def with_storage(self, storage: Storage) -> Self:
        """Return this backend with compiled bodies in ``storage``."""
        return replace(self, bodies=CompiledBodies(storage))

    def prepare(self, device: torch.device) -> None:
        """Determine the instruction sets of this machine, before bodies are compiled in parallel."""
        if traits_of(device).cpp_ops:
            instruction_sets()

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Print the graph and load the printed file, with compiled bodies."""
        return self.load(to_python(graph, title), graph, title)

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Return the function ``step`` of the printed file, which calls compiled bodies. On a CPU it can be recorded if
        layers consist of the package's C++ ops."""
        # Bodies are compiled before the file is loaded, since loading waits for the C++ ops, which build meanwhile.
        functions = self.bodies.functions(graph)

        def printed(bodies: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
            namespace = load_python(source, f"<{title}>")
            namespace.update(bodies)
            step: Callable[..., Any] = namespace["step"]
            return step

        repeated = {name for name, body in graph.bodies.items() if runs_recorded_ops(body)}
        if not any(graph.bodies[name].layers for name in repeated):
            return printed(functions)
        opaque = {name: function for name, function in functions.items() if name not in repeated}
        return RecordableStep(printed(functions), printed, opaque)

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """Return the files of the compiled bodies of ``graph``, by name."""
        return self.bodies.files(graph)

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """Return None: this backend has no CUDA graphs."""
        return None

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """Return the code that Inductor generated for each body of ``graph``."""
        return self.bodies.code(graph)


@dataclass(frozen=True)
class CudaGraph(Inductor):
    """Inductor's lowering, with each tier captured as one CUDA graph."""

    name: str = "cudagraph"

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """Return the CUDA graphs of a wrap on the arena's device."""
        return Captures(arena, CudaDevice(arena.device), weights)


BACKENDS: dict[str, type[Eager] | type[Inductor]] = {"eager": Eager, "inductor": Inductor, "cudagraph": CudaGraph}
_own: dict[str, type[Eager] | type[Inductor]] = {}


def register_backend(name: str, backend: type[Eager] | type[Inductor], *, replace: bool = False) -> None:
    """Register ``backend`` for ``wrap(backend=name)``.

    Args:
        backend: a subclass of :class:`Eager` or :class:`Inductor`. ``wrap`` creates an instance for each model, with
            the reason why it was chosen. Its ``name`` is the registered one.
        replace: whether it replaces another registered backend of that name.

    Raises:
        InvalidOption: the name is in use, ``backend`` is not such a class, or its constructor needs more arguments than
            ``wrap`` passes.
    """

    def refuse(field: str, value: object, reason: str) -> NoReturn:
        raise InvalidOption(where="register_backend", name=field, value=value, reason=reason)

    if not isinstance(name, str) or not name:
        refuse("name", name, "give a non-empty string")
    if not (isinstance(backend, type) and issubclass(backend, Eager | Inductor)):
        refuse("backend", backend, "give a subclass of speccompile.backends.Eager or Inductor")
    if name == "auto" or name in BACKENDS:
        refuse("name", name, "this package has a backend of that name; choose another name")
    try:
        inspect.signature(backend).bind("requested", name=name)
    except TypeError as error:
        refuse("backend", backend, f"wrap calls {backend.__qualname__}(reason, name=...), which fails: {error}")
    devices = getattr(backend, "devices", None)
    if not isinstance(devices, tuple) or not all(isinstance(device, str) for device in devices):
        refuse("backend", backend, f"its devices must be a tuple of types of device, and are {devices!r}")
    if name in _own and not replace:
        refuse("name", name, f"{_own[name].__qualname__} is registered under it; pass replace=True to replace it")
    _own[name] = backend


def backends() -> dict[str, type[Eager] | type[Inductor]]:
    """Return all backends by name: those of this package, and registered ones."""
    return BACKENDS | _own


def lower(backend: Backend, graph: StepGraph, title: str) -> Callable[..., Any]:
    """Call ``backend.lower(graph, title)``.

    Raises:
        BackendFailed: the backend is a registered one, and raised, or did not return a function. The errors of a step
            of such a backend also become this error.
    """
    return _step(backend, title, lambda: backend.lower(graph, title))


def load(backend: Backend, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
    """Call ``backend.load(source, graph, title)``, with the errors of :func:`lower`."""
    return _step(backend, title, lambda: backend.load(source, graph, title))


def ask(backend: Backend, what: str, call: Callable[[], T], kind: type | tuple[type, ...]) -> T:
    """Run ``call``, which calls ``backend``, and check that the result is an instance of ``kind``.

    Args:
        what: a verb and its object for the error message, such as ``lower the step``.

    Raises:
        BackendFailed: the backend is a registered one, and raised, or returned a value of another type.
    """
    try:
        found = call()
    except Exception as error:
        if isinstance(error, SpecCompileError) or type(backend) not in _own.values():
            raise
        raise BackendFailed(name=backend.name, what=what, reason=error_line(error)) from error
    if not isinstance(found, kind):
        raise BackendFailed(name=backend.name, what=what, reason=f"it returned {found!r}")
    return found


def _step(backend: Backend, title: str, call: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
    step = ask(backend, f"lower {title}", call, Callable)  # type: ignore[arg-type]
    if type(backend) not in _own.values():
        return step

    def watched(*tensors: Any) -> Any:
        return ask(backend, f"run {title}", lambda: step(*tensors), object)

    return watched


def choose_backend(name: str, device: torch.device) -> Backend:
    """Return the backend called ``name``. ``auto`` chooses CUDA graphs on CUDA, else Inductor if it can build code,
    else eager.

    Raises:
        UnknownBackend: no backend has that name.
        NeedsCuda, InvalidOption: the backend cannot run on ``device``.
    """
    if name == "auto":
        traits = traits_of(device)
        if traits.default_backend == CudaGraph.name:
            return CudaGraph("a step is one launch")
        if traits.host_memory and shutil.which("g++") is None and shutil.which("clang++") is None:
            warn_caller(
                "no C++ compiler (g++ or clang++) was found, so steps run op by op (backend 'eager'): several times "
                "slower than compiled, and their results may depend on the tier. Install one (Debian: apt-get install "
                "g++), or pass backend='eager' to silence this",
                Degraded,
            )
            return Eager("no C++ compiler was found, which Inductor needs on a CPU")
        return Inductor(f"compiled code is fastest on {device.type}")
    check_backend_device(name, device)
    return backends()[name]("requested", name=name)


def check_backend_device(name: str, device: torch.device) -> None:
    """Check that the backend called ``name`` runs on ``device``; ``auto`` runs on any.

    Raises:
        UnknownBackend, NeedsCuda, InvalidOption.
    """
    known = backends()
    if name == "auto":
        return
    if not isinstance(name, str) or name not in known:
        raise UnknownBackend(name=name, available=", ".join(["auto", *known]))
    devices = known[name].devices
    if device.type in devices:
        return
    if devices == ("cuda",):
        raise NeedsCuda(name=name, device=device)
    reason = f"it runs on {' and '.join(devices)}, and the model is on {device}"
    raise InvalidOption(where="wrap", name="backend", value=name, reason=reason)

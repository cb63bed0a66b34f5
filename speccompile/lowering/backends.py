"""Backends by name. A backend turns a verified step graph into a callable of its placeholders."""

from __future__ import annotations

import inspect
import shutil
from collections.abc import Callable
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
from speccompile.lowering.cuda.captures import Captures, Weights
from speccompile.lowering.cuda.device import CudaDevice
from speccompile.lowering.inductor import CompiledBodies
from speccompile.lowering.kernels import STOCK, Kernels, choose_kernels
from speccompile.utils.devices import traits_of
from speccompile.utils.instruction_sets import instruction_sets
from speccompile.utils.storage import CacheFolder, Storage
from speccompile.utils.warn import warn_caller

T = TypeVar("T")


class Backend(Protocol):
    """Lowers step graphs. ``reason`` is why it was taken, for ``explain()``; ``devices`` are the types of device that
    it runs on. A backend of your own derives from :class:`Eager`, which has a default for each method, or from
    :class:`Inductor`."""

    devices: ClassVar[tuple[str, ...]]

    @property
    def name(self) -> str:
        """The name that ``wrap(backend=...)`` and ``explain()`` have."""

    @property
    def reason(self) -> str:
        """Why this backend runs, for ``explain()``."""

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """What a step runs on."""

    def with_storage(self, storage: Storage) -> Backend:
        """This backend for one build, which reads what was compiled from ``storage`` and writes it there."""

    def prepare(self, device: torch.device) -> None:
        """Begin, beside other work, what :meth:`lower` will have to wait for."""

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Turn the last stage of a step into a function of the values of the graph's ports, in order. ``title`` names
        the step."""

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """The same of a printed step, which calls bodies of ``graph``."""

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """What a package keeps of the compiled bodies of ``graph``, by name."""

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """What captures the bound tiers of one wrap; None if they run as they are.

        ``weights`` are the model's own, by path, as they are when it is called.
        """

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """The module that calls the kernels of each compiled body of ``graph``; nothing of those that run op by op."""


@dataclass(frozen=True)
class Eager:
    """The printed step, executed: the reference that every other backend is held against."""

    reason: str
    name: str = "eager"

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """The kernels for a model: torch's own."""
        return STOCK

    def with_storage(self, storage: Storage) -> Self:
        """The same backend over another place for compiled code; this one has none."""
        return self

    def prepare(self, device: torch.device) -> None:
        """Nothing takes long here."""

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Print the graph and load the text."""
        return self.load(to_python(graph, title), graph, title)

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """The function ``step`` of the printed file."""
        return callable_of(source, f"<{title}>")

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """Files of what was compiled for ``graph``, by name: none."""
        return {}

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """The CUDA graphs of a wrap: none."""
        return None

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """The code that was compiled for each body: none."""
        return {}


@dataclass(frozen=True)
class Inductor:
    """The printed step with every outlined body replaced by its compiled artifact.

    Ops outside of the bodies run as they are: on a CPU a prototype of them was no faster compiled, and on CUDA few are
    left (:class:`speccompile.passes.target.outline_ends.OutlineEnds`).
    """

    reason: str
    name: str = "inductor"
    bodies: CompiledBodies = field(default_factory=lambda: CompiledBodies(CacheFolder()), repr=False, compare=False)

    devices: ClassVar[tuple[str, ...]] = ("cpu", "cuda")

    def choose_kernels(self, info: ModelInfo) -> Kernels:
        """The kernels for a model on its device."""
        return choose_kernels(info)

    def with_storage(self, storage: Storage) -> Self:
        """The same backend, whose compiled bodies are in ``storage``."""
        return replace(self, bodies=CompiledBodies(storage))

    def prepare(self, device: torch.device) -> None:
        """Determine the instruction sets of this machine, before bodies are compiled in parallel."""
        if traits_of(device).cpp_ops:
            instruction_sets()

    def lower(self, graph: StepGraph, title: str) -> Callable[..., Any]:
        """Print the graph and load the text, with compiled bodies."""
        return self.load(to_python(graph, title), graph, title)

    def load(self, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
        """The function ``step`` of the printed file, which calls compiled bodies."""
        # Before the text, which waits for the C++ ops: these are being built meanwhile.
        functions = self.bodies.functions(graph)
        namespace = load_python(source, f"<{title}>")
        namespace.update(functions)
        step: Callable[..., Any] = namespace["step"]
        return step

    def compiled_files(self, graph: StepGraph) -> dict[str, bytes]:
        """Files of the compiled bodies of ``graph``, by name."""
        return self.bodies.files(graph)

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """The CUDA graphs of a wrap: none."""
        return None

    def compiled_code(self, graph: StepGraph) -> dict[str, str]:
        """The code that Inductor generated for each body of ``graph``."""
        return self.bodies.code(graph)


@dataclass(frozen=True)
class CudaGraph(Inductor):
    """What Inductor lowers, with each tier captured as one CUDA graph."""

    name: str = "cudagraph"

    devices: ClassVar[tuple[str, ...]] = ("cuda",)

    def captures(self, arena: Arena, weights: Weights) -> Captures | None:
        """The CUDA graphs of a wrap on the arena's device."""
        return Captures(arena, CudaDevice(arena.device), weights)


BACKENDS: dict[str, type[Eager] | type[Inductor]] = {"eager": Eager, "inductor": Inductor, "cudagraph": CudaGraph}
_own: dict[str, type[Eager] | type[Inductor]] = {}


def register_backend(name: str, backend: type[Eager] | type[Inductor], *, replace: bool = False) -> None:
    """Make ``backend`` known to ``wrap(backend=name)``.

    Args:
        backend: a subclass of :class:`Eager` or :class:`Inductor`; ``wrap`` makes one for each model, with the reason
            why it was taken. Its ``name`` is the registered one.
        replace: whether it takes the place of another one of a user's own.

    Raises:
        InvalidOption: the name is taken, ``backend`` is no such class, or its constructor needs more than ``wrap``
            gives it.
    """

    def refuse(field: str, value: object, reason: str) -> NoReturn:
        raise InvalidOption(where="register_backend", name=field, value=value, reason=reason)

    if not isinstance(name, str) or not name:
        refuse("name", name, "give a text")
    if not (isinstance(backend, type) and issubclass(backend, Eager | Inductor)):
        refuse("backend", backend, "give a subclass of speccompile.backends.Eager or Inductor")
    if name == "auto" or name in BACKENDS:
        refuse("name", name, "this package has a backend of that name")
    try:
        inspect.signature(backend).bind("asked for", name=name)
    except TypeError as error:
        refuse("backend", backend, f"wrap makes it by {backend.__qualname__}(reason, name=...), which fails: {error}")
    devices = getattr(backend, "devices", None)
    if not isinstance(devices, tuple) or not all(isinstance(device, str) for device in devices):
        refuse("backend", backend, f"its devices have to be a tuple of types of device, and are {devices!r}")
    if name in _own and not replace:
        refuse("name", name, f"{_own[name].__qualname__} is registered by it; pass replace=True to replace that")
    _own[name] = backend


def backends() -> dict[str, type[Eager] | type[Inductor]]:
    """All by name: those of this package, and registered ones."""
    return BACKENDS | _own


def lower(backend: Backend, graph: StepGraph, title: str) -> Callable[..., Any]:
    """``backend.lower(graph, title)``.

    Raises:
        BackendFailed: the backend is a registered one, and raised, or returned no function. What a step of such a
            backend raises becomes one, too.
    """
    return _step(backend, title, lambda: backend.lower(graph, title))


def load(backend: Backend, source: str, graph: StepGraph, title: str) -> Callable[..., Any]:
    """``backend.load(source, graph, title)``. Raises as :func:`lower`."""
    return _step(backend, title, lambda: backend.load(source, graph, title))


def ask(backend: Backend, what: str, call: Callable[[], T], kind: type | tuple[type, ...]) -> T:
    """What ``call`` makes ``backend`` return: a ``kind``.

    Args:
        what: the backend was asked for, as a verb and its object.

    Raises:
        BackendFailed: the backend is a registered one, and raised, or returned something else.
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
    """The backend called ``name``; ``auto`` takes CUDA graphs on CUDA, else Inductor where it can build code, else
    eager.

    Raises:
        UnknownBackend: there is none of that name.
        NeedsCuda, InvalidOption: there is, and it cannot run on ``device``.
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
    return backends()[name]("asked for", name=name)


def check_backend_device(name: str, device: torch.device) -> None:
    """Check that the backend called ``name`` runs on ``device``; ``auto`` does on any.

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

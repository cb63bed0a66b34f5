"""The compiled bodies of one wrap: from the cache folder, or compiled, and as functions."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import profiler

from speccompile.errors import LoweringError
from speccompile.graph.body import Body
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.artifacts import artifact_file, artifact_name, is_saveable, read_artifact
from speccompile.lowering.inductor import compile_body
from speccompile.lowering.object_code import machine_code
from speccompile.utils.build_lock import one_build
from speccompile.utils.devices import traits_of
from speccompile.utils.inductor_folder import (
    make_inductor_folder_writable,
    replace_inductor_folder_after,
    warn_of_lost_kernels,
)
from speccompile.utils.progress import task
from speccompile.utils.storage import Storage
from speccompile.utils.torch_private import (
    CompiledArtifact,
    compiled_function,
    direct_call,
)

#: Returns one tensor, or a tuple of several, like the body.
BodyFunction = Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]


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
            name: self.storage.read(name) or artifact_file(compile_body(body, graph.device), body)
            for name, body in found.items()
        }
        return artifacts | machine_code([*artifacts.values()])

    def _load(self, body: Body, device: torch.device) -> _Loaded:
        name = artifact_name(body, device)
        if name not in self._loaded:
            data = self.storage.read(name)
            artifact = (
                self._make(name, body, device) if data is None else _again_elsewhere(lambda: read_artifact(name, data))
            )
            compiled, source = compiled_function(artifact)
            # On a GPU AOTAutograd's wrappers also align inputs. A CUDA graph pays for them only once.
            call = _direct(compiled, body) if traits_of(device).host_memory else _function(artifact, body)
            self._loaded[name] = _Loaded(artifact, call, source)
        return self._loaded[name]

    def _make(self, name: str, body: Body, device: torch.device) -> CompiledArtifact:
        with task(f"compile {body.name}" + f" for {len(body.layers)} layers" * bool(body.layers)):
            artifact = _again_elsewhere(lambda: compile_body(body, device))
        if is_saveable(artifact):
            self.storage.write(name, artifact_file(artifact, body))
        return artifact


def _again_elsewhere(make: Callable[[], CompiledArtifact]) -> CompiledArtifact:
    """Call ``make``. Call it again if Inductor's folder could not be written and was replaced."""
    try:
        return make()
    except LoweringError as error:
        if not replace_inductor_folder_after(error):
            raise
        return make()


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

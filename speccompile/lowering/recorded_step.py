"""Recorded steps: what a CUDA graph is on a GPU, for small steps on a CPU.

The ops of a step allocate their results, check their arguments and pass the dispatcher, in every step as in the one
before. A step of few tokens needs as long for this as for a third of its kernels. So it is recorded at its first run:
the kernel calls of its C++ ops, with their addresses, in memory that the recordings of a wrap share
(``ops/cpu/csrc/base/ops/recording.cpp``). Later runs only repeat these calls. What is not one of these ops (torch's own
ops, bodies with kernels that Inductor wrote) is called again from Python, and its results are copied to where the
recorded calls read them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.autograd import profiler

from speccompile.graph.body import Body
from speccompile.ops.define import reference_of
from speccompile.ops.in_cpp import is_recorded, library_of
from speccompile.utils.torch_private import OpOverload, TorchDispatchMode, has_modes, pytree, without_modes
from speccompile.utils.workers import in_pool

aten = torch.ops.aten

#: Tokens of a step, over all rows, up to which it is recorded: wider steps spend their time in kernels.
MOST_TOKENS = 64

#: Ops whose results are numbers that no step changes.
_SIZES = frozenset({aten.sym_size.int, aten.sym_stride.int, aten.sym_numel.default})
_MASKS = (torch.bool, torch.uint8)
_CHANGING = frozenset({torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output})

Step = Callable[..., Any]


class StepMemory:
    """Memory for the results of recorded steps. No two of these may run at once: a step overwrites what another one has
    computed. All that a step reads is in its arguments."""

    @functools.cached_property
    def handle(self) -> int | None:
        """The memory in C++; None if results of ops cannot lie in it. The C++ ops must be loaded."""
        handle: int | None = _library().speccompile_new_memory()
        if handle is not None:
            weakref.finalize(self, _library().speccompile_delete_memory, handle)
        return handle

    @property
    def nbytes(self) -> int:
        """Bytes in use or ready for a later result."""
        if self.__dict__.get("handle") is None:
            return 0
        size: int = _library().speccompile_memory_bytes(self.handle)
        return size


@dataclass(frozen=True)
class RecordableStep:
    """A loaded step that can be recorded once it is bound to its tensors.

    Args:
        step: the step with compiled bodies.
        printed: returns the step with the bodies that it is given; the other bodies run op by op.
        opaque: the compiled bodies that cannot run op by op without other kernels.
    """

    step: Step
    printed: Callable[[Mapping[str, Step]], Step]
    opaque: Mapping[str, Step]

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the step."""
        return self.step(*tensors)

    def bound(self, arguments: Sequence[torch.Tensor], pool_tokens: int | None, memory: StepMemory) -> RecordedStep:
        """Return the step over ``arguments``; its C++ ops run in their pool if ``pool_tokens`` is a number of
        tokens (:func:`speccompile.utils.workers.in_pool`). Its results lie in ``memory``."""
        return RecordedStep(self, tuple(arguments), pool_tokens, memory)


class RecordedStep:
    """A step that is bound to its tensors, is recorded at its first run, and is replayed at later ones.

    Args:
        step: the step.
        arguments: the tensors that it reads and writes.
        pool_tokens: see :meth:`RecordableStep.bound`.
        memory: see :meth:`RecordableStep.bound`.
    """

    def __init__(
        self, step: RecordableStep, arguments: tuple[torch.Tensor, ...], pool_tokens: int | None, memory: StepMemory
    ) -> None:
        self._step = step
        self._arguments = arguments
        self._pool_tokens = pool_tokens
        self._memory = memory
        self._recording: _Recording | None = None
        #: Why the step is not recorded; None: it is, or has not run yet.
        self.refusal: str | None = None

    def __call__(self, *tensors: torch.Tensor) -> Any:
        """Run the step op by op, and record it if it is not recorded."""
        if self._recording is not None or self.refusal is not None or _is_watched():
            return self._step(*tensors)
        if self._memory.handle is None:
            self.refusal = "another program's allocator of torch's memory is in use"
            return self._step(*tensors)
        recording = _Recording(self._memory.handle, self._pool_tokens)
        step = self._step.printed({name: recording.opaque(body) for name, body in self._step.opaque.items()})
        with recording.started():
            step(*self._arguments)
        self.refusal = recording.refusal
        if self.refusal is None:
            self._recording = recording
        return ()

    def replay(self) -> bool:
        """Run the recorded step. Return False and do nothing if the step is not recorded, or if a profiler or a mode
        must see every op."""
        if self._recording is None or _is_watched():
            return False
        self._recording.replay()
        return True

    def timed(self) -> list[tuple[str, float]]:
        """Replay the step once, call by call, and return the op and the seconds of each call, in order; nothing if the
        step is not recorded."""
        return [] if self._recording is None else self._recording.timed()


def recorded_function(compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return ``compute``, recorded at its first call. Each later call overwrites the tensor of the first one."""
    made: list[torch.Tensor] = []

    def step() -> None:
        result = compute()
        if made:
            # It also ran where a profiler watched: a replay writes the first result.
            made[0].copy_(result)
        else:
            made.append(result)

    # The result is read after the call, when steps may run.
    recorded = RecordableStep(step, lambda bodies: step, {}).bound((), None, StepMemory())

    def run() -> torch.Tensor:
        if not recorded.replay():
            recorded()
        return made[0]

    return run


def runs_recorded_ops(body: Body) -> bool:
    """Whether all work of ``body`` is done by ops that a recording can repeat."""
    return all(_is_recorded(node) for node in body.module.graph.nodes if node.op == "call_function")


def _is_recorded(node: fx.Node) -> bool:
    op = node.target
    if not isinstance(op, OpOverload):
        return True
    views = op.is_view or op in _SIZES or op is aten.reshape.default
    return views or is_recorded(op)


def _has_changing_size(op: OpOverload, arguments: Sequence[Any]) -> bool:
    """Whether the size of a result depends on values: of an index only where masks choose."""
    if op is aten.index.Tensor:
        return any(index is not None and index.dtype in _MASKS for index in arguments[1])
    return not _CHANGING.isdisjoint(op.tags)


def _is_watched() -> bool:
    return bool(profiler._is_profiler_enabled) or has_modes()


class _Recording:
    """Kernel calls in C++ and calls from Python, in their order."""

    def __init__(self, memory: int, pool_tokens: int | None) -> None:
        self._library = _library()
        self._handle: int = self._library.speccompile_new_recording(memory)
        weakref.finalize(self, self._library.speccompile_delete_recording, self._handle)
        self._pool_tokens = pool_tokens
        self._runs: list[functools.partial[None]] = []
        self._python: list[Callable[[], object]] = []
        self._first = 0
        #: The op of each kernel call.
        self._names: list[str] = []
        #: See :attr:`RecordedStep.refusal`.
        self.refusal: str | None = None

    @contextlib.contextmanager
    def started(self) -> Iterator[None]:
        """Record what the calling thread runs."""
        self._library.speccompile_start_recording(self._handle)
        try:
            with _CallRecorder(self):
                yield
        finally:
            self._library.speccompile_stop_recording()
        self._end_kernels()
        self._end_python()

    def replay(self) -> None:
        for run in self._runs:
            run()

    def timed(self) -> list[tuple[str, float]]:
        seconds = []

        def time_call(name: str, call: Callable[[], None]) -> None:
            started = time.perf_counter()
            call()
            seconds.append((name, time.perf_counter() - started))

        for run in self._runs:
            if run.func == self._repeat:
                for at in range(*run.args):
                    time_call(self._names[at], functools.partial(self._repeat, at, at + 1))
            else:
                time_call("calls from Python", run)
        return seconds

    def op(self, op: OpOverload, arguments: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Call ``op`` and record the call."""
        before = self._calls()
        result = op(*arguments, **options)
        if is_recorded(op) and (made := self._calls() - before):
            self._names += [op._schema.name] * made
            return result
        if _has_changing_size(op, arguments):
            self.refusal = f"a result of {op} depends on values"
        self._add(before, op, arguments, options, result, writes=op._schema.is_mutable, sizes=op in _SIZES)
        return result

    def opaque(self, body: Step) -> Step:
        """Return ``body`` as one call that is recorded."""

        def call(*tensors: torch.Tensor) -> Any:
            before = self._calls()
            with without_modes():
                result = body(*tensors)
                self._add(before, body, tensors, {}, result, writes=True)
            return result

        return call

    def _add(
        self,
        before: int,
        function: Step,
        arguments: Sequence[Any],
        options: Mapping[str, Any],
        result: Any,
        *,
        writes: bool,
        sizes: bool = False,
    ) -> None:
        """Record a call of ``function`` from Python, unless its results are views."""
        self._library.speccompile_keep_calls(self._handle, before)
        given = {_storage(tensor) for tensor in _tensors((arguments, options))}
        made = _tensors(result)
        if not made and not writes and not sizes:
            self.refusal = f"{function} returns a value that is not a tensor"
        own = [None if _storage(tensor) in given else tensor for tensor in made]
        if not writes and not any(tensor is not None and tensor.numel() for tensor in own):
            return
        self._end_kernels()
        self._python.append(_python_call(function, arguments, options, own))

    def _end_kernels(self) -> None:
        last = self._calls()
        if last > self._first:
            self._end_python()
            self._runs.append(functools.partial(self._repeat, self._first, last))
            self._first = last

    def _end_python(self) -> None:
        if self._python:
            self._runs.append(functools.partial(_call_all, tuple(self._python), self._pool_tokens))
            self._python.clear()

    def _repeat(self, first: int, last: int) -> None:
        tokens = -1 if self._pool_tokens is None else self._pool_tokens
        fault = self._library.speccompile_replay(self._handle, first, last, tokens)
        if fault is not None:
            raise RuntimeError(fault.decode(errors="replace"))

    def _calls(self) -> int:
        count: int = self._library.speccompile_recorded_calls(self._handle)
        return count


class _CallRecorder(TorchDispatchMode):
    """Passes every op to a recording."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(
        self,
        func: OpOverload,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        return self._recording.op(func, args, kwargs or {})


def _python_call(
    function: Step, arguments: Sequence[Any], options: Mapping[str, Any], results: Sequence[torch.Tensor | None]
) -> Callable[[], object]:
    """A call whose results are written to ``results``; None: the result is an argument, or a view of one."""
    call = functools.partial(_without_dispatcher(function), *arguments, **options)
    if not any(kept is not None for kept in results):
        return call
    if len(results) == 1 and isinstance(function, OpOverload) and (writing := _writing_form(function)) is not None:
        return functools.partial(writing, *arguments, **options, out=results[0])

    def call_and_copy() -> None:
        for made, kept in zip(_tensors(call()), results, strict=True):
            if kept is not None:
                kept.copy_(made)

    return call_and_copy


def _without_dispatcher(function: Step) -> Step:
    """The Python function of an op of this package that has no other kernel. The dispatcher takes as long as the
    function if it passes fifty tensors."""
    if not isinstance(function, OpOverload) or library_of(function) is not None:
        return function
    return reference_of(function) or function


@functools.cache
def _writing_form(op: OpOverload) -> OpOverload | None:
    """The overload of ``op`` that writes its result into an argument ``out``."""
    read = [(item.name, str(item.type)) for item in op._schema.arguments]
    for name in op.overloadpacket.overloads():
        form: OpOverload = getattr(op.overloadpacket, name)
        written = [item for item in form._schema.arguments if item.is_out]
        others = [(item.name, str(item.type)) for item in form._schema.arguments if not item.is_out]
        if [item.name for item in written] == ["out"] and others == read:
            return form
    return None


def _call_all(calls: Sequence[Callable[[], object]], pool_tokens: int | None) -> None:
    if torch.is_autocast_enabled("cpu"):
        # Entering it costs as much as a short call.
        with torch.autocast("cpu", enabled=False):
            return _call_all(calls, pool_tokens)
    threads = contextlib.nullcontext() if pool_tokens is None else in_pool(pool_tokens)
    with torch.no_grad(), threads:
        for call in calls:
            call()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@functools.cache
def _library() -> Any:
    # The library was loaded with its symbols visible to all. A replay runs without Python's lock.
    library = ctypes.CDLL(None)
    handle, number = ctypes.c_void_p, ctypes.c_int64
    for name, result, arguments in (
        ("new_memory", handle, []),
        ("delete_memory", None, [handle]),
        ("memory_bytes", number, [handle]),
        ("new_recording", handle, [handle]),
        ("delete_recording", None, [handle]),
        ("start_recording", None, [handle]),
        ("stop_recording", None, []),
        ("recorded_calls", number, [handle]),
        ("keep_calls", None, [handle, number]),
        ("replay", ctypes.c_char_p, [handle, number, number, number]),
    ):
        function = getattr(library, f"speccompile_{name}")
        function.restype, function.argtypes = result, arguments
    return library

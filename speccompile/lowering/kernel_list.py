"""List of the kernels that a finished step calls, from its graph, torch's dispatcher, and Inductor's code."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx

from speccompile.graph.fakes import faking
from speccompile.graph.step_graph import StepGraph
from speccompile.lowering.dispatched import (
    NAMESPACE,
    Dispatched,
    KernelKind,
    Kernels,
    dispatched,
    op_name,
    starts_kernels,
)
from speccompile.ops import in_cpp
from speccompile.ops.cpu.shims import shims
from speccompile.utils.torch_private import OpOverload, dispatch_table

STEP, DRAFTER = "step", "drafter"


@dataclass(frozen=True)
class KernelCall:
    """``calls`` calls of ``name`` in one run of ``caller``: the step, a split drafter, or one of their bodies."""

    caller: str
    name: str
    kind: KernelKind
    calls: int


def kernels_called(
    graph: StepGraph, device_type: str, code: Mapping[str, str], drafters: Iterable[StepGraph] = ()
) -> tuple[KernelCall, ...]:
    """Return the kernels that one run of a finished step calls, most frequent first, the step before its bodies.

    Args:
        device_type: type of the device that would run the step. The device need not exist.
        code: for each compiled body, the module that calls its kernels (``Backend.compiled_code``). Other bodies run op
            by op.
        drafters: the executables of a split drafter, which run before the step and are listed first.
    """
    callers: dict[str, Kernels] = {}
    for caller, step in (*((DRAFTER, drafter) for drafter in drafters), (STEP, graph)):
        found = callers.setdefault(caller, Counter())
        for node in step.graph.nodes:
            if node.op == "call_module":
                name = str(node.target)
                found[name, "body"] += 1
                if name not in callers:
                    callers[name] = _called_by_body(step, node, device_type, code.get(name))
            elif node.op == "call_function":
                found.update(_called(node.target, *_fakes(node), device_type))
    return tuple(
        KernelCall(caller, name, kind, calls)
        for caller, counts in callers.items()
        for (name, kind), calls in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def launches(calls: Iterable[KernelCall]) -> int:
    """Return the number of kernels that one run of a step starts, with its split drafter and all calls of bodies."""
    calls = tuple(calls)
    runs = Counter({STEP: 1, DRAFTER: 1})
    for call in calls:
        if call.kind == "body":
            runs[call.name] += call.calls
    return sum(runs[call.caller] * call.calls for call in calls if call.kind not in ("body", "plain"))


def _fakes(node: fx.Node) -> tuple[Any, Any]:
    def value(item: fx.Node) -> Any:
        return item.meta["val"]

    return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)


def _called_by_body(graph: StepGraph, call: fx.Node, device_type: str, code: str | None) -> Kernels:
    body = graph.bodies[str(call.target)]
    args, _ = _fakes(call)
    if device_type == "cuda":
        found = dispatched(lambda: body.module(*args))
        if code is None:
            return found.all
        # Inductor may have decomposed an op of the package.
        kept = {name: kernels for name, kernels in found.ours.items() if f"torch.ops.{name}." in code}
        return Dispatched(Counter(_written(code)), kept).all
    runner = _KernelRecorder(body.module)
    with faking():
        runner.run(*args)
    if code is None:
        return runner.found
    ours = Counter({key: calls for key, calls in runner.found.items() if key[1] != "stock"})
    return ours + Counter(_written(code))


class _KernelRecorder(fx.Interpreter):
    """Interpreter that runs a body on fakes, and records the kernels that each of its calls starts on a CPU."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: Kernels = Counter()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.found.update(_called_on_cpu(target))
        return super().call_function(target, args, kwargs)


def _called(target: Any, args: Any, kwargs: Any, device_type: str) -> Kernels:
    if device_type == "cuda":
        if not isinstance(target, OpOverload):
            return Counter()
        # Also for an op whose result may be a view: a cast is a view only if it has nothing to convert.
        return dispatched(lambda: target(*args, **kwargs)).all
    return Counter(_called_on_cpu(target))


def _called_on_cpu(target: Any) -> Iterator[tuple[str, KernelKind]]:
    """The kernel of one call, under the op's own name: on a CPU an op may read values before it computes."""
    if not starts_kernels(target):
        return
    if target.namespace != NAMESPACE:
        yield op_name(target), "stock"
    else:
        yield op_name(target), "c++" if _is_compiled(target) else "plain"


def _is_compiled(target: OpOverload) -> bool:
    """Whether the op's CPU kernel is C++, or a function that calls C++ ops and is registered with their library."""
    registrations = dispatch_table(target._schema.name)
    registered = dict(re.findall(r"^(\w+)(?:\[alias\])?: registered at (\S+):\d+", registrations, re.MULTILINE))
    file: str = registered.get("CPU") or registered["CompositeExplicitAutograd"]
    return not file.endswith(".py") or file == in_cpp.__file__


def _written(code: str) -> Iterator[tuple[str, KernelKind]]:
    """Kernels that a module of Inductor calls, except for the package's ops."""
    entry = re.search(r"^void inductor_entry_impl\(.*?^\} // inductor_entry_impl", code, re.MULTILINE | re.DOTALL)
    return _written_in_python(code) if entry is None else _written_in_cpp(entry[0])


def _written_in_cpp(entry: str) -> Iterator[tuple[str, KernelKind]]:
    """Kernels in C++ code for a CPU: calls of kernels, of ops that have a C function, and of other ops by name."""
    ours = {f"aoti_torch_cpu_{op._schema.name.partition('::')[2]}" for op in shims()}
    for kernel, function, name in re.findall(
        r'\b(cpp_\w+)\(|\b(aoti_torch_cpu_\w+)\(|"((?:torch\.ops\.|\w+::)[\w.:]+)"', entry
    ):
        if kernel:
            yield kernel, "inductor"
        elif function and function not in ours:
            yield function.removeprefix("aoti_torch_cpu_"), "stock"
        elif name:
            op = name.removeprefix("torch.ops.").replace("::", ".").removesuffix(".default")
            if not op.startswith(f"{NAMESPACE}."):
                yield op, "stock"


def _written_in_python(code: str) -> Iterator[tuple[str, KernelKind]]:
    tree = ast.parse(code)
    calls = [item for item in ast.walk(tree) if isinstance(item, ast.FunctionDef) and item.name == "call"]
    for item in calls:
        for call in ast.walk(item):
            if not isinstance(call, ast.Call):
                continue
            name = ast.unparse(call.func)
            if name.startswith("cpp_") or (name.startswith("triton_") and name.endswith(".run")):
                yield name.removesuffix(".run"), "inductor"
            elif name.startswith("extern_kernels."):
                yield name.removeprefix("extern_kernels."), "stock"
            elif name.startswith("torch.ops.") and not name.startswith(f"torch.ops.{NAMESPACE}."):
                yield name.removeprefix("torch.ops.").removesuffix(".default"), "stock"

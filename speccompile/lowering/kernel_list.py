"""Which kernels a finished step calls: read off its graph, torch's dispatcher, and the code that Inductor wrote."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import fx

from speccompile.graph.fakes import faking
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.shims import shims
from speccompile.ops.on_cuda import cuda_kernel
from speccompile.utils.torch_private import OpOverload, dispatch_table

#: Ours: ``triton``, ``c++``, and ``plain``, an op of ours that is made of torch's. Not ours: what ``inductor`` wrote,
#: and torch's own, ``stock``. ``body``: a function of the step, whose calls are listed beside.
KernelKind = Literal["triton", "c++", "plain", "inductor", "stock", "body"]

STEP, DRAFTER = "step", "drafter"
_NAMESPACE = "speccompile"


@dataclass(frozen=True)
class KernelCall:
    """``calls`` times ``name`` in one run of ``caller``: the step, a split drafter, or a body of these."""

    caller: str
    name: str
    kind: KernelKind
    calls: int


def kernels_called(
    graph: StepGraph, device_type: str, code: Mapping[str, str], drafters: Iterable[StepGraph] = ()
) -> tuple[KernelCall, ...]:
    """What one run of a finished step calls, most frequent first, the step before its bodies.

    Args:
        device_type: of the device that is to run it; there need not be one.
        code: of each compiled body, the module that calls its kernels (``Backend.compiled_code``). Other bodies run op
            by op.
        drafters: the executables of a split drafter, which run before the step and are listed first.
    """
    callers: dict[str, Counter[tuple[str, KernelKind]]] = {}
    for caller, step in (*((DRAFTER, drafter) for drafter in drafters), (STEP, graph)):
        found = callers.setdefault(caller, Counter())
        for node in step.graph.nodes:
            if node.op == "call_module":
                name = str(node.target)
                found[name, "body"] += 1
                if name not in callers:
                    callers[name] = _called_by_body(step, node, device_type, code.get(name))
            elif node.op == "call_function":
                found.update(_called(node.target, *_fakes(node), device_type, step))
    return tuple(
        KernelCall(caller, name, kind, calls)
        for caller, counts in callers.items()
        for (name, kind), calls in sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    )


def _fakes(node: fx.Node) -> tuple[Any, Any]:
    def value(item: fx.Node) -> Any:
        return item.meta["val"]

    return fx.map_arg(node.args, value), fx.map_arg(node.kwargs, value)


def _called_by_body(
    graph: StepGraph, call: fx.Node, device_type: str, code: str | None
) -> Counter[tuple[str, KernelKind]]:
    body = graph.bodies[str(call.target)]
    runner = _Runner(body.module, device_type, graph)
    with faking():
        runner.run(*_fakes(call)[0])
    if code is None:
        return runner.found
    ours = Counter({key: calls for key, calls in runner.found.items() if key[1] != "stock"})
    return ours + Counter(_written(code))


class _Runner(fx.Interpreter):
    """Runs a body on fakes, and notes what each of its calls would call."""

    def __init__(self, module: fx.GraphModule, device_type: str, graph: StepGraph) -> None:
        super().__init__(module)
        self._device_type, self._graph = device_type, graph
        self.found: Counter[tuple[str, KernelKind]] = Counter()

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.found.update(_called(target, args, kwargs, self._device_type, self._graph))
        return super().call_function(target, args, kwargs)


def _called(
    target: Callable[..., Any], args: Any, kwargs: Any, device_type: str, graph: StepGraph
) -> Iterator[tuple[str, KernelKind]]:
    """The kernels of one call; none for arithmetic on sizes and for views."""
    if not isinstance(target, OpOverload) or target.is_view or not _has_tensors(target):
        return
    name = str(target).removesuffix(".default")
    if target.namespace != _NAMESPACE:
        yield name, "stock"
        return
    kernel = cuda_kernel(target) if device_type == "cuda" else None
    if kernel is None:
        yield name, "c++" if _is_compiled(target, device_type) else "plain"
        return
    from speccompile.ops.triton.launch import launches_of

    with faking():
        for launch in launches_of(lambda: kernel(*args, **kwargs)):
            yield f"{name}: {launch.kernel.__name__}", "triton"


def _has_tensors(target: OpOverload) -> bool:
    schema = target._schema
    return schema.is_mutable or any("Tensor" in str(result.type) for result in schema.returns)


def _is_compiled(target: OpOverload, device_type: str) -> bool:
    """Whether the dispatcher got the op's kernel from C++."""
    registrations = dispatch_table(target._schema.name)
    key = {"cpu": "CPU", "cuda": "CUDA"}[device_type]
    places = dict(re.findall(r"^(\w+)(?:\[alias\])?: registered at (\S+):\d+", registrations, re.MULTILINE))
    place: str = places.get(key) or places["CompositeExplicitAutograd"]
    return not place.endswith(".py")


def _written(code: str) -> Iterator[tuple[str, KernelKind]]:
    """The kernels that a module of Inductor's calls, but for ops of ours."""
    entry = re.search(r"^void inductor_entry_impl\(.*?^\} // inductor_entry_impl", code, re.MULTILINE | re.DOTALL)
    return _written_in_python(code) if entry is None else _written_in_cpp(entry[0])


def _written_in_cpp(entry: str) -> Iterator[tuple[str, KernelKind]]:
    """On a CPU: calls of kernels, of ops that have a C function, and of others by their names."""
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
            if not op.startswith(f"{_NAMESPACE}."):
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
            elif name.startswith("torch.ops.") and not name.startswith(f"torch.ops.{_NAMESPACE}."):
                yield name.removeprefix("torch.ops.").removesuffix(".default"), "stock"

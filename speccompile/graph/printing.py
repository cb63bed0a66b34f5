"""Printing of a step graph as Python that runs. Users read the same file that the backends execute."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from types import CodeType
from typing import Any

import torch
from torch import fx

from speccompile.errors import LoweringError
from speccompile.graph.body import Body, Part
from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.in_cpp import libraries_of
from speccompile.utils.torch_private import OpOverload

# Arithmetic on sizes that torch.export leaves in the graph. It is printed as operators, which need no import.
_INFIX: dict[Any, str] = {
    operator.add: "{} + {}",
    operator.sub: "{} - {}",
    operator.mul: "{} * {}",
    operator.floordiv: "{} // {}",
    operator.mod: "{} % {}",
    operator.getitem: "{}[{}]",
    torch.sym_max: "max({}, {})",
    torch.sym_min: "min({}, {})",
}

_HEADER = '''"""{title}"""

import torch
from torch import device, inf, nan  # noqa: F401

import speccompile.lowering.stage_ops  # noqa: F401  registers torch.ops.speccompile
'''

_PARTS: dict[Part, str] = {
    "layers": "Decoder layers {layers}.",
    "prologue": "What the model computes before its first decoder layer.",
    "epilogue": "What the model computes between its last decoder layer and the lm_head.",
}

_LOAD = "speccompile.lowering.stage_ops.load_compiled({libraries})\n"

#: The first line of the part that runs a printed stage as a script: random inputs, and a call that prints the outputs.
_RUNNER = "def make_inputs("

_MAIN = '''

def make_inputs(seed=0, device="cpu"):
    """Random inputs that are valid for every index in the step; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)

    def real(shape, dtype, scale):
        return (torch.randn(shape, generator=generator) * scale).to(dtype).to(device)

    def whole(shape, dtype, low, high):
        return torch.randint(low, high, shape, generator=generator).to(dtype).to(device)

    def distinct(shape, dtype, high):
        count = torch.Size(shape).numel()
        return (torch.arange(count, dtype=dtype, device=device) % high).reshape(shape)

    return [
{inputs}
    ]


if __name__ == "__main__":
    inputs = make_inputs()
    before = [tensor.clone() for tensor in inputs]
    outputs = step(*inputs)
    for name, output in zip({output_names}, outputs):
        print("output", name, tuple(output.shape), output.dtype, output.double().sum().item())
    for name, old, new in zip({input_names}, before, inputs):
        if not torch.equal(old, new):
            print("wrote", name, tuple(new.shape), new.dtype, new.double().sum().item())
'''


def to_python(graph: StepGraph, title: str = "A step graph.") -> str:
    """The whole graph as one file that imports only torch and this package's ops.

    It defines a function for each body, ``step(*inputs)`` with the graph's inputs in order, and ``make_inputs(seed)``.
    """
    used = {str(node.target) for node in graph.graph.nodes if node.op == "call_module"}
    modules = [graph.graph, *(body.module.graph for name, body in graph.bodies.items() if name in used)]
    parts = [_HEADER.format(title=title)]
    if libraries := libraries_of(modules):
        parts.append(_LOAD.format(libraries=", ".join(f'"{library}"' for library in libraries)))
    for name, body in graph.bodies.items():
        if name in used:
            parts.append(_body_function(body))
    parts.append(_step_function(graph))
    inputs = "\n".join(f"        {_example(graph.ports[node.name])}," for node in graph.placeholders)
    parts.append(
        _MAIN.format(
            inputs=inputs, output_names=_output_names(graph), input_names=[node.name for node in graph.placeholders]
        )
    )
    return "\n".join(parts)


def without_runner(source: str) -> str:
    """The bodies and ``step`` of a printed stage, for comparisons of stages. The rest has lines of thousands of
    characters with the names of all inputs."""
    return source.partition(f"\n{_RUNNER}")[0]


def load_python(source: str, filename: str) -> dict[str, Any]:
    """Execute a printed stage and return its namespace (``step``, ``make_inputs``, the bodies)."""
    namespace: dict[str, Any] = {"__name__": filename}
    exec(_compiled(source, filename), namespace)
    return namespace


@functools.lru_cache(maxsize=256)
def _compiled(source: str, filename: str) -> CodeType:
    # Half the time of wrapping a tiny model is compiling its steps. The cache serves models that are wrapped again.
    return compile(source, filename, "exec")


def _output_names(graph: StepGraph) -> list[str]:
    outputs: Any = graph.output.args[0]
    return [node.name for node in outputs]


def _body_function(body: Body) -> str:
    names = [node.name for node in body.module.graph.find_nodes(op="placeholder")]
    layers = ", ".join(str(layer) for layer in body.layers)
    doc = f'    """{_PARTS[body.part].format(layers=layers)}"""'
    lines = [*_statements(body.module.graph.nodes), _return(body.module.graph)]
    return f"\ndef {body.name}({', '.join(names)}):\n{doc}\n" + "\n".join(lines) + "\n"


def _step_function(graph: StepGraph) -> str:
    arguments = []
    for node in graph.placeholders:
        port = graph.ports[node.name]
        sizes = ", ".join(str(size) for size in port.shape)
        dtype = str(port.dtype).removeprefix("torch.")
        arguments.append(f"    {node.name},  # {port.role} {dtype}[{sizes}]")
    lines = [*_statements(graph.graph.nodes), _return(graph.graph)]
    return "\ndef step(\n" + "\n".join(arguments) + "\n):\n" + "\n".join(lines) + "\n"


def _statements(nodes: Iterable[fx.Node]) -> list[str]:
    lines: list[str] = []
    current_pass = None
    for node in nodes:
        if node.op not in ("call_function", "call_module"):
            continue
        owner = node.meta.get("pass")
        if owner != current_pass:
            lines.append(f"    # {owner}")
            current_pass = owner
        if node.target in _INFIX:
            left, right = (_literal(value) for value in node.args)
            call = _INFIX[node.target].format(left, right)
        else:
            call = f"{_target(node)}({_arguments(node)})"
        lines.append(f"    {node.name} = {call}{_shape_comment(node)}" if node.users else f"    {call}")
    return lines


def _return(graph: fx.Graph) -> str:
    (result,) = graph.output_node().args
    return f"    return {_literal(result)}"


def _target(node: fx.Node) -> str:
    if node.op == "call_module":
        return str(node.target)
    if isinstance(node.target, OpOverload):
        return f"torch.ops.{node.target}"
    raise LoweringError(
        f"cannot print the call of {node.target!r} (node {node.name!r}): it is not a torch op",
        node=node.name,
        target=repr(node.target),
    )


def _arguments(node: fx.Node) -> str:
    values = [_literal(value) for value in node.args]
    values += [f"{name}={_literal(value)}" for name, value in node.kwargs.items()]
    return ", ".join(values)


def _literal(value: Any) -> str:
    if isinstance(value, fx.Node):
        return value.name
    if isinstance(value, tuple):
        inner = ", ".join(_literal(item) for item in value)
        return f"({inner},)" if len(value) == 1 else f"({inner})"
    if isinstance(value, list | fx.immutable_collections.immutable_list):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, torch.device):
        return f"device({str(value)!r})"
    return repr(value)


def _shape_comment(node: fx.Node) -> str:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return ""
    return f"  # {str(value.dtype).removeprefix('torch.')}[{', '.join(str(size) for size in value.shape)}]"


def _example(port: Port) -> str:
    shape = repr(tuple(port.shape))
    if port.distinct:
        return f"distinct({shape}, {port.dtype}, {port.high})"
    if port.dtype.is_floating_point:
        scale = 0.1 if port.role == "weight" and len(port.shape) > 1 else 1.0
        return f"real({shape}, {port.dtype}, {scale})"
    if port.dtype is torch.bool:
        return f"whole({shape}, {port.dtype}, 0, 2)"
    return f"whole({shape}, {port.dtype}, {port.low}, {port.high if port.high is not None else 2})"


def callable_of(source: str, filename: str) -> Callable[..., tuple[torch.Tensor, ...]]:
    """``step`` of a printed stage."""
    function: Callable[..., tuple[torch.Tensor, ...]] = load_python(source, filename)["step"]
    return function

"""A captured graph as JSON: ops by name, arguments by value, weights by their names in the model."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx, nn

from speccompile.errors import CaptureError
from speccompile.graph.port import Port
from speccompile.graph.stage import CAPTURE
from speccompile.graph.state import Layout
from speccompile.graph.step_graph import SIZE_OPERATORS, Anchors, StepGraph, Values
from speccompile.graph_capture.held_tensors import held_by_modules
from speccompile.graph_capture.model_info import named_tensors
from speccompile.graph_capture.ports import constant_port, input_ports, weight_port
from speccompile.utils.torch_private import OpOverload

# Functions that export leaves in a graph beside torch ops: arithmetic on sizes, and the choice of one of many results.
_OPERATORS = {f"operator.{f.__name__}": f for f in SIZE_OPERATORS}


def to_json(graph: StepGraph) -> dict[str, Any]:
    """Return all parts of a captured graph except its tensors."""
    anchors = graph.anchors
    return {
        "ports": [_port(graph.ports[node.name]) for node in graph.placeholders],
        "nodes": [_node(node) for node in graph.graph.nodes if node.op == "call_function"],
        "outputs": _encode(graph.output.args[0]),
        "anchors": {
            "tokens": anchors.tokens.name,
            "positions": anchors.positions.name,
            "start": anchors.start.name,
            "layers": [layer.name for layer in anchors.layers],
            "final_norm": anchors.final_norm.name,
            "lm_head": anchors.lm_head.name,
        },
        "values": {name: node.name for name, node in graph.values.items()},
        "sizes": dict(graph.sizes),
        "route": graph.route,
        "facts": sorted(graph.facts),
    }


def from_json(data: dict[str, Any], model: nn.Module, layout: Layout, device: torch.device) -> StepGraph:
    """Return the graph that :func:`to_json` described, over the weights of ``model``."""
    tensors, held = named_tensors(model), held_by_modules(model)
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    ports = {}
    for entry in data["ports"]:
        port = _read_port(entry, tensors, held, layout, device, data["sizes"])
        ports[port.name] = port
        nodes[port.name] = graph.placeholder(port.name)
        nodes[port.name]._rename(port.name)  # fx converts capital letters to lower case
        nodes[port.name].target = nodes[port.name].name
        nodes[port.name].meta = {"pass": CAPTURE}
    for entry in data["nodes"]:
        args = _decode(entry["args"], nodes)
        kwargs = {name: _decode(value, nodes) for name, value in entry["kwargs"].items()}
        node = graph.create_node("call_function", _read_target(entry["target"]), tuple(args), kwargs, entry["name"])
        node.meta = {"pass": CAPTURE} if entry["layer"] is None else {"pass": CAPTURE, "layer": entry["layer"]}
        nodes[entry["name"]] = node
    graph.output(tuple(_decode(data["outputs"], nodes)))
    names = data["anchors"]
    step = StepGraph(
        graph=graph,
        ports=ports,
        anchors=Anchors(
            nodes[names["tokens"]],
            nodes[names["positions"]],
            nodes[names["start"]],
            [nodes[name] for name in names["layers"]],
            nodes[names["final_norm"]],
            nodes[names["lm_head"]],
        ),
        layout=layout,
        device=device,
        sizes=data["sizes"],
        route=data["route"],
        facts=set(data["facts"]),
        values=Values((name, nodes[node]) for name, node in data["values"].items()),
    )
    step.propagate()
    return step


def _port(port: Port) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": port.name, "role": port.role, "path": port.path, "own": port.own}
    if port.role == "weight" and port.path is None:
        file = io.BytesIO()
        torch.save(port.value, file)
        entry["constant"] = base64.b64encode(file.getvalue()).decode()
        entry["held"] = port.held
    elif port.role == "input":
        entry |= {"shape": port.shape, "dtype": _encode(port.dtype)}
    return entry


def _read_port(
    entry: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    held: dict[str, torch.Tensor],
    layout: Layout,
    device: torch.device,
    sizes: dict[str, int],
) -> Port:
    name = entry["name"]
    if entry["role"] == "state":
        return Port.of_state(layout.tensors[name], device)
    if entry["role"] == "input":
        # A head has more inputs than a model.
        other = Port(name, "input", tuple(entry["shape"]), _decode(entry["dtype"], {}), device)
        return input_ports(layout, device, sizes).get(name, other)
    if entry["path"] is None:
        file = io.BytesIO(base64.b64decode(entry["constant"]))
        value = torch.load(file, map_location=device, weights_only=True)
        now = held.get(entry["held"])
        if now is not None and (now.shape, now.dtype) == (value.shape, value.dtype):
            # The model's own tensor, so steps follow changes in place. The capture check compares its values.
            value = now
        return constant_port(name, value, device, held=entry["held"])
    return weight_port(entry["path"], tensors[entry["path"]], device, own=entry["own"])


def _node(node: fx.Node) -> dict[str, Any]:
    if isinstance(node.target, OpOverload):
        target = str(node.target)
    else:
        target = f"operator.{cast(Any, node.target).__name__}"
        if target not in _OPERATORS:
            raise CaptureError(f"node {node.name!r} calls {node.target!r}, which is not a torch op")
    return {
        "name": node.name,
        "target": target,
        "args": _encode(list(node.args)),
        "kwargs": {name: _encode(value) for name, value in node.kwargs.items()},
        "layer": node.meta.get("layer"),
    }


def _read_target(name: str) -> Any:
    if name in _OPERATORS:
        return _OPERATORS[name]
    return functools.reduce(getattr, name.split("."), torch.ops)


def _encode(value: Any) -> Any:
    """Convert an argument to JSON. A value without a form in JSON becomes ``{kind: text}``."""
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, list | tuple):
        return [_encode(item) for item in value]
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, float):
        return {"float": value.hex()}
    if value is None or isinstance(value, bool | int | str):
        return value
    raise CaptureError(f"cannot store the argument {value!r} of a captured graph")


def _decode(value: Any, nodes: dict[str, fx.Node]) -> Any:
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    readers: dict[str, Callable[[str], Any]] = {
        "node": nodes.__getitem__,
        "torch": functools.partial(getattr, torch),
        "device": torch.device,
        "float": float.fromhex,
    }
    return readers[kind](text)

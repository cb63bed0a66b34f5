"""The ports of a captured graph: weights, state and inputs, under their names in the model and the arena."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx, nn
from torch.export.graph_signature import InputKind

from speccompile.errors import CaptureError
from speccompile.graph.port import Port
from speccompile.graph.state import Layout
from speccompile.graph_capture.held_tensors import held_by_modules
from speccompile.graph_capture.model_info import ModelInfo, named_tensors
from speccompile.graph_capture.rope_positions import PARTS, ROPE_POSITIONS


def input_ports(layout: Layout, device: torch.device, sizes: Mapping[str, int]) -> dict[str, Port]:
    """Return the ports of a captured graph's inputs, at the example sizes B and T."""
    both, int64 = (sizes["B"], sizes["T"]), torch.int64
    last_position = max(1, layout.cache_len - sizes["T"])
    return {
        "input_ids": Port("input_ids", "input", both, int64, device, high=layout.vocab_size),
        "position_ids": Port("position_ids", "input", both, int64, device, high=last_position, distinct=True),
        "row_slots": Port("row_slots", "input", both[:1], int64, device, high=layout.max_batch + 1, distinct=True),
        # Positions of a row's recurrent state. In examples it has absorbed nothing, and no token is a prompt's.
        "row_absorbed": Port("row_absorbed", "input", both[:1], int64, device, high=1),
        "row_settled": Port("row_settled", "input", both[:1], int64, device, high=1),
        "row_prompt": Port("row_prompt", "input", both[:1], int64, device, high=1),
        ROPE_POSITIONS: Port(ROPE_POSITIONS, "input", (PARTS, *both), int64, device, high=last_position),
    }


def kv_names(layers: Sequence[int]) -> dict[str, str]:
    """Return the arena's names for the KV of ``layers``, by the placeholders of the lists ``keys`` and ``values``."""
    names = {"keys": "k", "values": "v"}
    return {f"{kind}_{index}": f"{name}_{layer}" for kind, name in names.items() for index, layer in enumerate(layers)}


def name_ports(
    graph: fx.Graph,
    program: torch.export.ExportedProgram,
    module: nn.Module,
    info: ModelInfo,
    states: Mapping[str, str],
    layout: Layout,
    inputs: Mapping[str, Port],
    changing: Collection[str],
) -> dict[str, Port]:
    """Create a port for every placeholder, and rename the placeholder to its name in the arena or the module.

    Args:
        module: the exported module, which is ``model`` of a wrapper.
        states: the arena's name of each state tensor, by the name of its placeholder.
        changing: paths of tensors that the module itself rewrites.
    """
    tensors = named_tensors(module)
    held = {tensor.data_ptr(): name for name, tensor in held_by_modules(module).items()}
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
    ports: dict[str, Port] = {}
    for node in graph.find_nodes(op="placeholder"):
        spec = specs[node.name]
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            path = str(spec.target).removeprefix("model.")
            port = weight_port(path, tensors[path], info.device, own=path in changing)
        elif spec.kind is InputKind.CONSTANT_TENSOR:
            constant = program.constants[str(spec.target)]
            port = constant_port(node.name, constant, info.device, held=held.get(constant.data_ptr()))
        elif spec.kind is InputKind.USER_INPUT and node.name in inputs:
            port = inputs[node.name]
        elif spec.kind is InputKind.USER_INPUT:
            port = Port.of_state(layout.tensors[states[node.name]], info.device)
        else:
            raise CaptureError(
                f"export of {info.name} left the tensor {node.name!r} as {spec.kind.name.lower()}; "
                "a step graph needs a port for every tensor"
            )
        node._rename(port.name)
        node.target = node.name
        ports[node.name] = replace(port, name=node.name)
    return ports


def weight_port(path: str, tensor: torch.Tensor, device: torch.device, *, own: bool) -> Port:
    """Return the port of a tensor of the model: its own storage, or a copy if the model rewrites it (``own``)."""
    value = tensor.detach().clone() if own else tensor.detach()
    return Port(
        path.replace(".", "_"), "weight", tuple(value.shape), value.dtype, device, path=path, own=own, value=value
    )


def constant_port(name: str, value: torch.Tensor, device: torch.device, *, held: str | None = None) -> Port:
    """Return the port of a tensor that is neither parameter nor buffer: its own storage, if it is on ``device``."""
    value = value.detach().to(device)
    return Port(name, "weight", tuple(value.shape), value.dtype, device, held=held, value=value)

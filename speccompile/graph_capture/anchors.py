"""Search for the nodes where passes work, by module path and never by op pattern."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx
from transformers import PreTrainedModel

from speccompile.errors import AnchorError
from speccompile.graph.step_graph import Anchors
from speccompile.graph_capture.model_info import decoder_layers, module_path


@dataclass(frozen=True)
class ModulePaths:
    """Module paths of the anchors inside the exported module."""

    layers: str
    lm_head: str

    @staticmethod
    def of(model: PreTrainedModel, prefix: str) -> ModulePaths:
        """Return the paths in ``model``, each after ``prefix``."""
        head = model.get_output_embeddings()
        return ModulePaths(f"{prefix}{decoder_layers(model)[0]}", f"{prefix}{module_path(model, head)}")


def modules_of(node: fx.Node) -> list[str]:
    """Return paths of the modules whose forward created ``node``, outermost first."""
    return [path for path, _ in node.meta.get("nn_module_stack", {}).values()]


def layer_of(node: fx.Node, paths: ModulePaths) -> int | None:
    """Return the decoder layer that ``node`` belongs to; None if it belongs to none."""
    prefix = paths.layers + "."
    for path in modules_of(node):
        if path.startswith(prefix):
            return int(path[len(prefix) :].split(".")[0])
    return None


def live_outs(region: Sequence[fx.Node]) -> list[fx.Node]:
    """Return tensors of ``region`` with users outside of it. Sizes are left out, since they belong to the inputs."""
    inside = set(region)
    tensors = [node for node in region if isinstance(node.meta["val"], torch.Tensor)]
    return [node for node in tensors if any(user not in inside for user in node.users)]


def find_anchors(graph: fx.Graph, paths: ModulePaths, num_layers: int) -> Anchors:
    """Locate inputs, decoder layers, final norm and lm_head.

    Raises:
        AnchorError: an anchor is missing, or a layer has more than one live-out.
    """
    calls = [node for node in graph.nodes if node.op == "call_function"]
    regions: dict[int, list[fx.Node]] = {}
    for node in calls:
        layer = layer_of(node, paths)
        if layer is not None:
            regions.setdefault(layer, []).append(node)
    layers: list[fx.Node] = []
    for index in range(num_layers):
        if layers and index not in regions:
            layers.append(layers[-1])  # it passes its input on (cross-attention without an image)
            continue
        outs = live_outs(regions.get(index, []))
        if len(outs) != 1:
            names = ", ".join(node.name for node in outs) or "none"
            raise AnchorError(
                anchor=f"decoder layer {index}",
                reason=f"later layers must read one tensor of it, as of a layer that runs once; they read: {names}",
            )
        layers.append(outs[0])
    head = [node for node in calls if paths.lm_head in modules_of(node)]
    if not head:
        raise AnchorError(anchor="the lm_head", reason=f"no op comes from module {paths.lm_head!r}")
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    final_norm = head[0].args[0]
    if not isinstance(final_norm, fx.Node):
        raise AnchorError(anchor="the final norm", reason=f"{head[0].name!r} does not read a hidden state")
    return Anchors(
        tokens=inputs["input_ids"],
        positions=inputs["position_ids"],
        start=calls[0],
        layers=layers,
        final_norm=final_norm,
        lm_head=head[-1],
    )

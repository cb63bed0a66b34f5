"""Chunks of prompts read embeddings of images in the places of their placeholder tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph_capture.rope_positions import ROPE_POSITIONS
from speccompile.multimodal.model_inputs import EMBEDDED, EMBEDDINGS, LAYER_EMBEDDINGS, ROPE_OFFSETS, ModelInputs
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.mark_embeddings import TOKEN_EMBEDDINGS


@dataclass(frozen=True)
class ReadEmbeddings(Pass):
    """The first decoder layer of a prompt's chunk reads ``prompt_embeddings`` where ``prompt_embedded`` is set, instead
    of the tokens' embeddings. Rotary positions of several parts are those of the prompt, and what DeepStack adds after
    the first layers is added. The host writes all of it before the chunk.

    Decode steps do not run this pass: none of their tokens is a placeholder of an image.
    """

    inputs: ModelInputs

    name: ClassVar[str] = "read_embeddings"
    looks_for: ClassVar[str] = "the input of the first decoder layer"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("target_inputs", "embeddings_marked")
    provides: ClassVar[Facts] = facts("embeddings_read")

    def run(self, graph: StepGraph) -> Changes:
        hidden = graph.values[TOKEN_EMBEDDINGS]
        _put_after(graph, hidden, place_embeddings, graph.state(EMBEDDINGS), graph.state(EMBEDDED))
        for index in range(self.inputs.layers):
            layer = graph.anchors.layers[index]
            added = _put_after(graph, layer, add_embeddings, graph.state(LAYER_EMBEDDINGS), index=index)
            graph.anchors.layers[index] = added
        if self.inputs.parts:
            _put_after(graph, graph.values[ROPE_POSITIONS], add_offsets, graph.state(ROPE_OFFSETS))
        return Changes(1 + self.inputs.layers, "embeddings of images")


def _put_after(
    graph: StepGraph, node: fx.Node, function: Callable[..., torch.Tensor], *state: fx.Node, **constants: int
) -> fx.Node:
    """Let all readers of ``node`` read ``function(node, *state)`` instead, and all its names mean that."""
    readers = list(node.users)
    new: fx.Node = graph.insert(function, node, *state, before=node.next, **constants)
    for reader in readers:
        reader.replace_input_with(node, new)
    for name, value in graph.values.items():
        if value is node:
            graph.values[name] = new
    return new


def place_embeddings(hidden: torch.Tensor, embeddings: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
    """``hidden`` ``[1, T, M]``, with ``embeddings`` ``[W, M]`` in the places of ``embedded`` ``[W]``; T <= W."""
    width = hidden.shape[1]
    return torch.where(embedded[:width, None], embeddings[:width], hidden)


def add_embeddings(hidden: torch.Tensor, embeddings: torch.Tensor, *, index: int) -> torch.Tensor:
    """``hidden`` ``[1, T, M]`` plus those of the layer ``index`` of ``embeddings`` ``[D, W, M]``; T <= W."""
    return hidden + embeddings[index, : hidden.shape[1]]


def add_offsets(positions: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Rotary ``positions`` ``[PARTS, 1, T]`` plus ``offsets`` ``[PARTS, W]``; T <= W."""
    return positions + offsets[:, None, : positions.shape[2]]

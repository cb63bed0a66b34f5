"""Positions of decoders of encoder-decoders, which their modules count from the length of the cache.

While a model is captured, the methods that count compute from each row's own positions instead: T5's bias by relative
positions (``T5Attention.compute_bias``), and M2M100's look-up
(``M2M100SinusoidalPositionalEmbedding.create_position_ids_from_input_ids``, transformers,
``models/t5/modeling_t5.py`` and ``models/m2m_100/modeling_m2m_100.py``). Other files have the same methods.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from speccompile.graph_capture.anchors import ModulePaths, layer_of
from speccompile.graph_capture.attention import current_run
from speccompile.graph_capture.key_index import needed_for


@contextlib.contextmanager
def decoder_positions_captured(model: nn.Module) -> Iterator[None]:
    """Let ``model`` compute from the positions of the forward under capture in this context. No other code may run
    ``model`` meanwhile."""
    replaced: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        for name, function in _FUNCTIONS.items():
            if callable(getattr(type(module), name, None)):
                setattr(module, name, partial(function, module))
                replaced.append((module, name))
    try:
        yield
    finally:
        for module, name in replaced:
            delattr(module, name)


def _bias(self: Any, query_length: int, key_length: int, *args: Any, **rest: Any) -> torch.Tensor:
    """The bias ``[B, H, T, S]`` of T5's scores."""
    run = current_run()
    assert run is not None
    keys = torch.arange(key_length, device=run.positions.device)
    options = {
        "bidirectional": not self.is_decoder,
        "num_buckets": self.relative_attention_num_buckets,
        "max_distance": self.relative_attention_max_distance,
    }
    # UMT5's method reads them from the module.
    accepted = inspect.signature(self._relative_position_bucket).parameters
    given = {name: value for name, value in options.items() if name in accepted}
    bucket = self._relative_position_bucket(keys - run.positions[:, :, None], **given)
    bias: torch.Tensor = self.relative_attention_bias(bucket)
    return bias.permute(0, 3, 1, 2)


def _positions(self: Any, input_ids: torch.Tensor, padding_idx: int, *args: Any) -> torch.Tensor:
    """Indices ``[B, T]`` of a table that begins after ``padding_idx``, which is that of pad tokens."""
    run = current_run()
    assert run is not None
    return torch.where(input_ids == padding_idx, 0, run.positions + 1) + padding_idx


_FUNCTIONS: dict[str, Callable[..., torch.Tensor]] = {
    "compute_bias": _bias,
    "create_position_ids_from_input_ids": _positions,
}


def share_biases(graph: fx.Graph, paths: ModulePaths) -> None:
    """Move what later layers also read, and what depends on no token, out of the layer that computes it. It is placed
    before that layer, since later layers may only read its hidden states."""
    of_tokens = _readers(next(node for node in graph.nodes if node.name == "input_ids"))
    layers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        layer = layer_of(node, paths) if node.op == "call_function" else None
        if layer is not None:
            layers.setdefault(layer, []).append(node)
    for nodes in layers.values():
        inside = set(nodes)
        read_later = {
            node
            for node in nodes
            if node not in of_tokens
            and any(user not in inside and layer_of(user, paths) is not None for user in node.users)
        }
        shared = needed_for(read_later) & inside
        first = next(node for node in nodes if node not in shared)
        for node in nodes:
            if node in shared:
                first.prepend(node)
                del node.meta["nn_module_stack"]


def _readers(node: fx.Node) -> set[fx.Node]:
    """The nodes whose values, not only sizes, depend on ``node``."""
    found, left = set[fx.Node](), [node]
    while left:
        item = left.pop()
        for user in item.users:
            if user not in found and user.target is not torch.ops.aten.sym_size.int:
                found.add(user)
                left.append(user)
    return found

"""Sliding windows of a drafter whose start stays fixed while it drafts.

A head is trained in this way: the row of a draft token attends to the keys of the row that drafting starts from, and to
the drafts before its own. The window of draft token t is therefore wider by t than that of a committed token. Source:
speculators, ``models/eagle3/attention.py``: ``create_combined_mask_mod`` is called once, and
``extend_mask_for_draft_tokens`` adds one key for each draft token.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import fx

import speccompile.ops  # noqa: F401  defines the ops
from speccompile.graph.body import Body
from speccompile.graph.step_graph import StepGraph
from speccompile.utils.torch_private import argument_index

#: The attention ops, with the index of ``window`` among their arguments.
WINDOW: dict[object, int] = {
    op: argument_index(op, "window")
    for op in (
        getattr(torch.ops.speccompile, name).default
        for name in ("attention", "attention_fixed_order", "native_attention", "native_rotary_attention")
    )
}


def has_windows(drafter: StepGraph) -> bool:
    """Whether bodies of an outlined ``drafter`` attend to a sliding window."""
    return any(_windows(body.module.graph) for body in drafter.bodies.values())


def add_wider_bodies(drafter: StepGraph, draft_len: int) -> None:
    """Add the bodies to an outlined ``drafter`` that :func:`widened` needs for chains of ``draft_len`` draft tokens."""
    for name, body in list(drafter.bodies.items()):
        if _windows(body.module.graph):
            for by in range(1, draft_len):
                drafter.bodies[_name(name, by)] = _wider(body, by)


def widened(drafter: StepGraph, by: int) -> StepGraph:
    """``drafter`` with all sliding windows wider by ``by``; ``drafter`` itself if it has none."""
    wider = {name: _name(name, by) for name in drafter.bodies if _name(name, by) in drafter.bodies}
    if not wider:
        return drafter
    graph = drafter.copy()
    for node in graph.graph.nodes:
        if node.op == "call_module" and node.target in wider:
            node.target = wider[str(node.target)]
    return graph


def _name(body: str, by: int) -> str:
    return f"{body}_window_{by}_wider"


def _windows(graph: fx.Graph) -> list[fx.Node]:
    """Calls of an attention op with a window."""
    calls = (node for node in graph.nodes if node.op == "call_function" and node.target in WINDOW)
    return [node for node in calls if len(node.args) > (at := WINDOW[node.target]) and node.args[at] is not None]


def _wider(body: Body, by: int) -> Body:
    name, graph = _name(body.name, by), fx.Graph()
    graph.output(graph.graph_copy(body.module.graph, {}))
    for node in _windows(graph):
        window = node.args[WINDOW[node.target]]
        assert isinstance(window, int)
        node.update_arg(WINDOW[node.target], window + by)
    module = fx.GraphModule(torch.nn.Module(), graph, class_name=name)
    key = hashlib.sha256(f"{body.key} {by} wider".encode()).hexdigest()
    return replace(body, name=name, module=module, key=key)

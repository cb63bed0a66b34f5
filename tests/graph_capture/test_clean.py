"""Cleaned graphs read no input for its size alone."""

from __future__ import annotations

import torch
from torch import nn

from speccompile.graph_capture.clean import clean_graph

aten = torch.ops.aten


class Two(nn.Module):
    def forward(self, x: torch.Tensor, unread: torch.Tensor) -> torch.Tensor:
        torch._check(unread.shape[0] == x.shape[0])
        return x + x.new_zeros(x.shape[0], x.shape[1])


def test_a_size_is_read_from_an_input_that_is_used() -> None:
    dynamic = torch.export.Dim.DYNAMIC
    shapes = ({0: dynamic, 1: dynamic}, {0: dynamic})
    program = torch.export.export(Two(), (torch.zeros(5, 7), torch.zeros(5)), dynamic_shapes=shapes, strict=False)
    graph = program.graph_module.graph
    x, unread = (node for node in graph.nodes if node.op == "placeholder")
    sizes = [node for node in graph.nodes if node.target is aten.sym_size.int]
    assert sizes
    # Export chooses an input for each size; here it is made to be the one that nothing else uses.
    for node in sizes:
        if node.args[1] == 0:
            node.args = (unread, 0)
    clean_graph(graph)
    assert not unread.users
    assert {node.args for node in graph.nodes if node.target is aten.sym_size.int} == {(x, 0), (x, 1)}

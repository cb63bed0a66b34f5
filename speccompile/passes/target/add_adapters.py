"""Low-rank adapters beside the linears of the captured model."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

import speccompile.ops.lora  # noqa: F401  defines the ops
from speccompile.adapters.buffers import OF_SLOT, AdaptedLinear, AdaptedVector, AdapterBuffers
from speccompile.errors import InvalidOption
from speccompile.graph.step_graph import StepGraph, Values
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts

aten = torch.ops.aten

#: Ops that read the weight of a norm.
_FACTORS = (aten.mul.Tensor, aten.add.Tensor, aten._to_copy.default, aten.to.dtype)

#: A linear of the model, and its call in the graph.
Member = tuple[AdaptedLinear, fx.Node]


@dataclass(frozen=True)
class AddAdapters(Pass):
    """Inserts, after the linears that read one input, one op that adds the product of each row's adapter to each of
    them. Names ``row_adapters`` ``[B]``, the index of each row's adapter.

    It runs before linears are packed, joined or rounded, and does not depend on their later form. A vector with buffers
    is replaced by that of each row's adapter.

    Args:
        native: the C++ op; else its reference in PyTorch.

    Raises:
        InvalidOption: a linear with buffers is not a linear over the step's tokens in the captured graph, or a vector
            is not a factor of values of each token.
    """

    buffers: AdapterBuffers
    native: bool = False

    name: ClassVar[str] = "add_adapters"
    named_values: ClassVar[tuple[str, ...]] = ("row_adapters",)
    looks_for: ClassVar[str] = "linears of decoder layers"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("adapters_added")

    def run(self, graph: StepGraph) -> Changes:
        inputs = {node.name: node for node in graph.placeholders}
        of_path = {port.path: inputs[name] for name, port in graph.ports.items() if port.role == "weight"}
        groups: dict[tuple[fx.Node, int], list[Member]] = {}
        for linear in self.buffers.linears:
            node = _only_linear(graph, of_path.get(f"{linear.path}.weight"))
            if node is None:
                reason = (
                    f"{linear.path} is not a linear over the tokens of a step in the captured model; leave it out: "
                    "Adapters(modules=...)"
                )
                raise InvalidOption(where="wrap", name="adapters", value=linear.path, reason=reason)
            groups.setdefault((_input(node), linear.layer), []).append((linear, node))
        rows = graph.insert(adapters_of, graph.state(OF_SLOT), inputs["row_slots"], before=_first_call(graph))
        graph.anchors.start = rows
        graph.name_value("row_adapters", rows)
        added: dict[str, fx.Node] = {}
        for members in groups.values():
            # An op accepts linears whose numbers in the layer follow one another.
            for run in _runs(members):
                added |= self._add(graph, run, rows)
        graph.propagate()
        for vector in self.buffers.vectors:
            if vector.linear:
                _add_to_bias(graph, vector, added[vector.linear], rows)
            else:
                _replace_vector(graph, vector, of_path[vector.path], rows)
        return Changes(len(self.buffers.linears), f"{len(self.buffers.linears)} linears, {self.buffers.count} adapters")

    def _add(self, graph: StepGraph, members: list[Member], rows: fx.Node) -> dict[str, fx.Node]:
        """The new outputs of the linears, by their paths."""
        linears = [node for _, node in members]
        # Now that of adapters, if another linear has computed it.
        x = _input(linears[0])
        state = [[graph.state(getattr(linear, matrix)) for linear, _ in members] for matrix in ("a", "b")]
        ranks, scales = graph.state(members[0][0].ranks), graph.state(members[0][0].scales)
        op = torch.ops.speccompile.native_lora if self.native else torch.ops.speccompile.lora
        arguments: Any = (x, linears, *state, ranks, scales, members[0][0].number, rows)
        with graph.graph.inserting_after(_side_by_side(graph, linears)):
            whole = graph.graph.call_function(op.default, arguments)
        meta = {key: value for key, value in linears[0].meta.items() if key == "layer"}
        whole.meta, last, adapted = dict(meta), whole, {}
        for index, linear in enumerate(linears):
            with graph.graph.inserting_after(last):
                last = graph.graph.call_function(operator.getitem, (whole, index))
            last.meta = dict(meta)
            linear.replace_all_uses_with(last, delete_user_cb=lambda user: user is not whole)
            adapted[linear] = last
        _rename(graph, adapted)
        return {linear.path: adapted[node] for linear, node in members}


def _replace_vector(graph: StepGraph, vector: AdaptedVector, weight: fx.Node, rows: fx.Node) -> None:
    """Let the readers of ``weight`` read the vector of each row."""
    before, seen = list(weight.users), set[fx.Node]()
    readers = list(before)
    while readers:
        node = readers.pop()
        if node.target not in _FACTORS:
            reason = f"{vector.path} of the draft head is read by {node.target}; use Adapters(head_rank=None)"
            raise InvalidOption(where="wrap", name="adapters", value=vector.path, reason=reason)
        if node.meta["val"].ndim > 1:
            seen.add(node)
        else:
            readers.extend(node.users)
    (dims,) = {node.meta["val"].ndim for node in seen}
    whole = graph.insert(vectors_of, graph.state(vector.state), weight, rows, before=rows.next, dims=dims)
    weight.replace_all_uses_with(whole, delete_user_cb=before.__contains__)


def _add_to_bias(graph: StepGraph, vector: AdaptedVector, output: fx.Node, rows: fx.Node) -> None:
    """Let the readers of ``output`` read it with the change of each row's bias."""
    before = list(output.users)
    change = graph.insert(changes_of, graph.state(vector.state), rows, before=rows.next)
    whole = graph.insert(torch.add, output, change, before=output.next)
    whole.meta |= {key: value for key, value in output.meta.items() if key == "layer"}
    output.replace_all_uses_with(whole, delete_user_cb=before.__contains__)
    _rename(graph, {output: whole})


def _rename(graph: StepGraph, replaced: Mapping[fx.Node, fx.Node]) -> None:
    """Let anchors and named values be the new nodes."""
    graph.anchors = graph.anchors.mapped(lambda node: replaced.get(node, node))
    graph.values = Values((name, replaced.get(node, node)) for name, node in graph.values.items())


def vectors_of(vectors: torch.Tensor, shared: torch.Tensor, places: torch.Tensor, *, dims: int) -> torch.Tensor:
    """The vector of each row, ``[B, 1, ..., F]`` of ``dims`` dimensions: ``shared`` ``[F]`` for a row without an
    adapter.

    Args:
        vectors: ``[P, F]``; places: ``[B]``.
    """
    of_rows = torch.where((places >= 0)[:, None], vectors[places.clamp(min=0)], shared)
    for _ in range(dims - 2):
        of_rows = of_rows[:, None]
    return of_rows


def changes_of(vectors: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """The change ``[B, 1, F]`` of each row's bias, of ``vectors`` ``[P, F]``; ``places`` is ``[B]``."""
    of_rows = vectors[places.clamp(min=0)]
    return torch.where((places >= 0)[:, None], of_rows, torch.zeros_like(of_rows))[:, None]


def adapters_of(of_slot: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The adapter of each row ``[B]``, of ``of_slot`` ``[N]``."""
    return of_slot[slots]


def _first_call(graph: StepGraph) -> fx.Node:
    return next(node for node in graph.graph.nodes if node.op != "placeholder")


def _input(linear: fx.Node) -> fx.Node:
    x = linear.args[1 if linear.target is aten.addmm.default else 0]
    assert isinstance(x, fx.Node)
    return x


def _only_linear(graph: StepGraph, weight: fx.Node | None) -> fx.Node | None:
    """The reader of ``weight``, if it is one linear over a value of each token, ``[B, T, K]`` or ``[B * T, K]``."""
    if weight is None or len(weight.users) != 1:
        return None
    (user,) = weight.users
    place = 1 if user.target is aten.linear.default else 2
    if user.target not in (aten.linear.default, aten.addmm.default) or user.args[place] is not weight or user.kwargs:
        return None
    rows, width = graph.sizes["B"], graph.sizes["T"]
    return user if tuple(_input(user).meta["val"].shape[:-1]) in ((rows, width), (rows * width,)) else None


def _runs(members: list[Member]) -> list[list[Member]]:
    """``members``, cut where the next number is not the next one of the layer."""
    runs: list[list[Member]] = []
    for member in members:
        if runs and runs[-1][-1][0].number + 1 == member[0].number:
            runs[-1].append(member)
        else:
            runs.append([member])
    return runs


def _side_by_side(graph: StepGraph, linears: list[fx.Node]) -> fx.Node:
    """Move ``linears`` after the first one of them: all are computed before any is read. Returns the last."""
    order = {node: place for place, node in enumerate(graph.graph.nodes)}
    first, *others = sorted(linears, key=order.__getitem__)
    last = first
    for node in others:
        # They read the input of all, and weights and biases, which are placeholders.
        last.append(node)
        last = node
    return last

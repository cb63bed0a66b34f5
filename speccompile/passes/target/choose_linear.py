"""Choice of the kernel for linears."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import fx

from speccompile.errors import InvalidOption
from speccompile.graph.port import Port
from speccompile.graph.step_graph import StepGraph
from speccompile.ops.cpu.packing import WeightPacks
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.target.pack_ports import is_dense, pack_ports

aten = torch.ops.aten

#: Choices among scores. PhiMoE chooses one expert after the other.
_CHOICES = (aten.topk.default, aten.max.dim, aten.argmax.default)
#: Ops between a router's linear and its choice, for each score or over the scores of a token.
_OVER_SCORES = frozenset(
    {
        *_CHOICES,
        aten.softmax.int,
        aten.sigmoid.default,
        aten.add.Tensor,
        aten.sub.Tensor,
        aten.mul.Tensor,
        aten.div.Tensor,
        aten.tanh.default,
        aten._to_copy.default,
        aten.to.dtype,
        aten.view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.masked_fill.Scalar,
        aten.where.self,
    }
)
#: Inputs in another order: by the node that they are, and the identity of the order.
_Ordered = dict[tuple[fx.Node, int], fx.Node]


@dataclass(frozen=True)
class KeepLinears(Pass):
    """Keeps torch's own linears."""

    name: ClassVar[str] = "choose_linear"
    looks_for: ClassVar[str] = "linears"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("linears_chosen")
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        return Changes(0, "stock linears")


@dataclass(frozen=True)
class PackLinears(Pass):
    """Every linear over a weight of the model reads a packed copy of it; an embedding that is tied to one, too, and a
    table of the tokens if its form rounds.

    ``packs`` choose each weight's form. A weight that is read in any other way keeps its form, and so do its linears.
    With ``rounded_only``, so does one whose form does not round.
    """

    packs: WeightPacks = field(default_factory=WeightPacks, compare=False)
    rounded_only: bool = False

    name: ClassVar[str] = "choose_linear"
    looks_for: ClassVar[str] = "linears"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("captured")
    provides: ClassVar[Facts] = facts("linears_packed")
    # A model may have all of its weights in other forms (such as experts).
    optional: ClassVar[bool] = True

    def run(self, graph: StepGraph) -> Changes:
        done = kept = 0
        ordered: _Ordered = {}
        for node in graph.placeholders:
            port = graph.ports[node.name]
            users = list(node.users)
            if port.role != "weight" or port.value is None:
                continue
            quantized = self.packs.find_quantized(port.value)
            if quantized is None and not any(_is_linear(user, node) for user in users):
                if not _is_table(graph, node):
                    continue
                if not self.packs.form_of(str(port.path), of_vocabulary=True).rounds:
                    # It needs no pack, since a step reads few of its rows.
                    rows, size = port.shape
                    self.packs.tables[str(port.path)] = rows, size
                    continue
            transposed = {user.target is aten.addmm.default for user in users}
            if len(transposed) > 1 or not all(_can_pack(user, node) for user in users) or not _is_packable(port):
                if quantized is not None:
                    raise _not_multiplied(port, users)
                kept += len(users)
                continue
            kind = {"of_vocabulary": _is_of_vocabulary(graph, node), "is_router": is_router(node)}
            if self.rounded_only and not self.packs.form_of(str(port.path), **kind).rounds:
                kept += len(users)
                continue
            self._pack(graph, node, port, True in transposed, ordered)
            done += len(users)
        forms = f" ({self.packs.describe()})" if self.packs.rounds else ""
        return Changes(done, f"{done} over packed weights{forms}" + (f", {kept} stock" if kept else ""))

    def _pack(self, graph: StepGraph, node: fx.Node, port: Port, transposed: bool, ordered: _Ordered) -> None:
        assert port.value is not None and port.path is not None
        weight = port.value.detach().t() if transposed else port.value.detach()
        is_table = not any(_is_linear(user, node) for user in node.users)
        pack = self.packs.of(
            port.path,
            weight,
            of_vocabulary=_is_of_vocabulary(graph, node),
            is_table=is_table,
            is_router=is_router(node),
            transposed=transposed,
        )
        form = pack.form
        parts = pack_ports(graph, port, pack)
        for user in list(node.users):
            with graph.graph.inserting_before(user):
                if user.target is aten.embedding.default:
                    arguments = (*parts, user.args[1], *form.embedding_sizes(weight))
                    new = graph.graph.call_function(form.embedding, arguments)
                    if form.rounds and port.dtype != torch.float32:
                        new = graph.graph.call_function(aten._to_copy.default, (new,), {"dtype": port.dtype})
                else:
                    x, bias = _operands(user)
                    if pack.order is not None:
                        x = _in_order(graph, x, pack.order, port, ordered)
                    new = graph.graph.call_function(form.linear, (x, *parts, bias, weight.shape[0]))
            new.meta = {key: value for key, value in user.meta.items() if key in ("layer", "pass")}
            graph.replace(user, new)
        graph.drop_placeholder(node)
        if self.packs.freed is not None:
            self.packs.replace_original(port.path, port.release)


def _in_order(graph: StepGraph, x: fx.Node, order: torch.Tensor, port: Port, known: _Ordered) -> fx.Node:
    """``x`` with its last dimension in ``order``. Linears with the same order read one node, and can be joined."""
    key = x, id(order)
    if key not in known:
        own = replace(
            port,
            name=f"{port.name}_order",
            shape=tuple(order.shape),
            dtype=order.dtype,
            value=order,
            own=True,
            high=len(order),
            distinct=True,
        )
        places = graph.weight(own)
        with graph.graph.inserting_after(x):
            known[key] = graph.graph.call_function(aten.index_select.default, (x, -1, places))
        known[key].meta = {name: value for name, value in x.meta.items() if name in ("layer", "pass")}
    return known[key]


def _not_multiplied(port: Port, users: Sequence[fx.Node]) -> InvalidOption:
    ops = ", ".join(sorted({str(user.target) for user in users}))
    reason = f"the model reads {port.path} by {ops}, and only linears and embeddings can read it; leave it out"
    return InvalidOption(where="wrap", name="weights", value=port.path, reason=reason)


def _is_of_vocabulary(graph: StepGraph, weight: fx.Node) -> bool:
    """Whether it is an embedding's or the lm_head's."""
    return any(
        user.target is aten.embedding.default or _operands(user)[0] is graph.anchors.final_norm for user in weight.users
    )


def is_router(weight: fx.Node) -> bool:
    """Whether a linear over ``weight`` computes scores of which the greatest are chosen: those of experts."""
    return any(_is_linear(user, weight) and _are_chosen_from(user) for user in weight.users)


def _are_chosen_from(scores: fx.Node) -> bool:
    waiting, seen = [scores], set()
    while waiting:
        node = waiting.pop()
        if node.target in _CHOICES:
            return True
        seen.add(node)
        waiting += [user for user in node.users if user.target in _OVER_SCORES and user not in seen]
    return False


def _is_linear(user: fx.Node, weight: fx.Node) -> bool:
    if user.target is aten.linear.default:
        fits = user.args[1] is weight and user.args[0] is not weight
    else:
        # A GPT-2 linear: bias + x @ w.
        fits = user.target is aten.addmm.default and user.args[2] is weight and len(user.args) == 3 and not user.kwargs
    if not fits:
        return False
    # The ops accept a bias ``[N]``, not an addend that is broadcast or differs by row.
    _, bias = _operands(user)
    return bias is None or bias.meta["val"].shape == user.meta["val"].shape[-1:]


def _is_table(graph: StepGraph, weight: fx.Node) -> bool:
    """Whether tokens read its rows, and nothing else reads it."""
    return bool(weight.users) and all(
        user.target is aten.embedding.default and _are_tokens(user.args[1], graph.anchors.tokens)
        for user in weight.users
    )


def _are_tokens(ids: object, tokens: fx.Node) -> bool:
    """Whether ``ids`` are the tokens: in another shape, as places of a rank's part of the table, or with others in the
    place of some (of images, in Gemma; of what another rank has)."""
    if not isinstance(ids, fx.Node) or ids is tokens:
        return ids is tokens
    if ids.target in (aten.view.default, aten.reshape.default, aten.clone.default, aten.sub.Tensor):
        return _are_tokens(ids.args[0], tokens)
    replaced = (aten.where.self, aten.where.ScalarSelf, aten.where.ScalarOther)
    return ids.target in replaced and any(_are_tokens(value, tokens) for value in ids.args[1:])


def _can_pack(user: fx.Node, weight: fx.Node) -> bool:
    # The other arguments of an embedding concern training only.
    return _is_linear(user, weight) or (user.target is aten.embedding.default and user.args[0] is weight)


def _operands(linear: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    if linear.target is aten.addmm.default:
        bias, x = linear.args[:2]
    else:
        x, bias = linear.args[0], linear.args[2] if len(linear.args) > 2 else linear.kwargs.get("bias")
    assert isinstance(x, fx.Node) and (bias is None or isinstance(bias, fx.Node))
    return x, bias


def _is_packable(port: Port) -> bool:
    return is_dense(port) and len(port.shape) == 2

"""KV in pages of a pool that all slots share, instead of one piece for each slot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.errors import PassError
from speccompile.graph.paging import PAGES, GathersKV, Paging, page_and_place, paged
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.utils.torch_private import argument_index

aten = torch.ops.aten
ATTENTION = ("attention", "attention_fixed_order", "native_attention", "native_rotary_attention")


@dataclass(frozen=True)
class PageKV(Pass):
    """Reads and writes of KV go through the state ``pages [N, M]``: position p of slot n is place ``p % C`` of page
    ``pages[n, p // C]`` of a pool ``[P, C, ...]``.

    Attention ops receive ``pages``. Where a model gathers the KV of its rows, it receives 0 after their last position:
    pages that no request owns may hold anything. That copies as many positions as a sequence may have, in each step.

    Args:
        gathers: whether it may.

    Raises:
        GathersKV: it would, and may not.
    """

    paging: Paging
    gathers: bool = True

    name: ClassVar[str] = "page_kv"
    looks_for: ClassVar[str] = "keys and values"
    region: ClassVar[PassRegion] = "model"
    requires: ClassVar[Facts] = facts("attention_chosen")
    provides: ClassVar[Facts] = facts("kv_paged")

    def run(self, graph: StepGraph) -> Changes:
        flat = graph.layout
        graph.layout = paged(flat, self.paging)
        caches = [node for node in graph.placeholders if self._is_cache(graph, node)]
        pages = graph.state(PAGES)
        for cache in caches:
            graph.resize_state(cache)
        changed = 0
        for cache in caches:
            for user in list(cache.users):
                self._page(graph, cache, user, pages, flat.tensors[cache.name].shape)
                changed += 1
        return Changes(changed, f"{len(caches)} tensors in pages of {self.paging.size} positions")

    @staticmethod
    def _is_cache(graph: StepGraph, node: fx.Node) -> bool:
        tensor = graph.layout.tensors.get(node.name) if graph.ports[node.name].role == "state" else None
        return tensor is not None and tensor.in_pages

    def _page(self, graph: StepGraph, cache: fx.Node, user: fx.Node, pages: fx.Node, shape: tuple[int, ...]) -> None:
        """Let ``user`` read or write pages instead of ``cache``, whose shape was ``shape``."""
        if user.target in _WITH_PAGES:
            before = _WITH_PAGES[user.target]
            given = (*user.args, *[None] * (before - len(user.args)))
            user.args = (*given[:before], pages, *given[before + 1 :])
            return
        if user.target in _READS_KIND:
            return
        if user.target is aten.sym_size.int:
            _replace_by_number(graph, user, shape[int(user.args[1])])  # type: ignore[arg-type]
            return
        indices = user.args[1] if user.target in (aten.index_put_.default, aten.index.Tensor) else ()
        assert isinstance(indices, list | tuple)
        where = [item for item in indices if isinstance(item, fx.Node)]
        if user.args[0] is not cache or len(where) != len(indices) or len(where) not in (1, 2):
            raise PassError(
                f"{user.target} reads or writes {cache.name} in a form that has no pages: leave out kv_memory"
            )
        if len(where) == 2:
            page, place = self._insert(graph, page_and_place, pages, *where, before=user, size=self.paging.size)
            user.args = (cache, [page, place], *user.args[2:])
            return
        if not self.gathers:
            raise GathersKV(f"the model gathers {cache.name}, as no attention op of this package does")
        positions = next(node for node in graph.placeholders if node.name == "position_ids")
        gathered = self._insert(graph, _gathered, cache, pages, *where, positions, before=user, capacity=shape[1])
        graph.replace(user, gathered)

    @staticmethod
    def _insert(
        graph: StepGraph, function: Callable[..., Any], *nodes: fx.Node, before: fx.Node, **constants: int
    ) -> Any:
        """Insert nodes that belong to the layer of ``before``."""
        known = set(graph.graph.nodes)
        result = graph.insert(function, *nodes, before=before, **constants)
        for node in graph.graph.nodes:
            if node not in known:
                node.meta |= {key: before.meta[key] for key in ("layer", "pass") if key in before.meta}
        return result


def _replace_by_number(graph: StepGraph, node: fx.Node, number: int) -> None:
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg((user.args, user.kwargs), lambda item: number if item is node else item)
    graph.graph.erase_node(node)


#: Ops that only read the dtype and the device of a tensor.
_READS_KIND = frozenset({aten.new_ones.default, aten.new_zeros.default, aten.new_full.default, aten.new_empty.default})
_WITH_PAGES: dict[object, int] = {
    op: argument_index(op, "pages") for op in (getattr(torch.ops.speccompile, name).default for name in ATTENTION)
}


def _gathered(
    cache: torch.Tensor, pages: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *, capacity: int
) -> torch.Tensor:
    """KV of the rows, ``[B, S, ...]``: 0 after the last of ``positions`` ``[B, T]``."""
    # Without views: these would fix the number of rows.
    every, size = torch.arange(capacity, device=positions.device), cache.shape[1]
    rows = cache[pages[slots[:, None], every // size], every % size]
    unused = every > positions.amax(1, keepdim=True)
    for _ in range(rows.dim() - 2):
        unused = unused.unsqueeze(-1)
    return rows.masked_fill(unused, 0.0)

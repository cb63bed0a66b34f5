"""Ops whose insides no graph shows: on CUDA they ask no tensor for a value and copy nothing from or to the host.

They run over meta tensors in the place of CUDA's: those have no values either, and need no GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from speccompile import Tree
from speccompile.graph.state import B, E, K, N, S, StateSpec, V, core_state
from speccompile.ops.draft_levels import (
    choose_nodes,
    first_place,
    likeliest_tree,
    next_level,
    positions_of_nodes,
    ranked,
    with_nodes,
)
from speccompile.ops.noise import add_gumbel
from speccompile.ops.stored_trees import chain_parents, proposed_or_stored_tree, store_tree_, stored_tree
from speccompile.ops.verify_tree import chain_in_tree, rows_on_path
from speccompile.passes.step.judge_chain import other_branches
from speccompile.passes.step.ranked_tree import of_independent
from speccompile.passes.step.tree_accept import next_node
from speccompile.passes.step.tree_drafts import fit, static_form
from speccompile.sampling.base import Processor
from speccompile.sampling.pipeline import PROCESSORS, sampling_state
from speccompile.sampling.process_scores import state_of

ROWS, WIDTH, DRAFTS = 3, 4, 3
SIZES = {N: 6, S: 40, K: DRAFTS, B: ROWS, E: 8, V: 5000}
STATE = {spec.name: spec for spec in [*core_state(SIZES[V]), *sampling_state()]}


class OneDevice(TorchDispatchMode):
    """Refuses ops that take something from the host to the device, or back. Numbers travel with a kernel's launch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [value for value in pytree.tree_leaves((args, kwargs, result)) if isinstance(value, torch.Tensor)]
        moves = func in (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)
        if moves and len({value.device.type for value in tensors}) > 1:
            raise AssertionError(f"{func} between the host and the device")
        return result


def without_values(run: Callable[[], Any]) -> None:
    """``run`` makes its tensors itself, on the default device."""
    with torch.device("meta"), torch.no_grad(), OneDevice():
        run()


def state(spec: StateSpec) -> torch.Tensor:
    return torch.zeros(spec.resolve(SIZES).shape, dtype=spec.dtype)


def slots() -> torch.Tensor:
    return torch.zeros(ROWS, dtype=torch.int64)


@pytest.mark.parametrize("drafted", [0, 2])
@pytest.mark.parametrize("processor", PROCESSORS, ids=lambda processor: processor.name)
def test_processors(processor: Processor, drafted: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # What calls the host does nothing in a capture; requests that need it are refused there.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    def run() -> None:
        tensors = [state(STATE[name]) for name in state_of(processor)]
        own = [tensor[slots()] for tensor in tensors]
        scores = torch.zeros(ROWS, WIDTH, SIZES[V])
        processor.call(scores, torch.zeros(ROWS, SIZES[S], dtype=torch.int64), slots(), drafted, own)

    without_values(run)


def test_noise() -> None:
    def run() -> None:
        places = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        for start in (None, slots()):
            add_gumbel(torch.zeros(ROWS, WIDTH, SIZES[V]), torch.zeros(ROWS), slots(), places, 0, start)

    without_values(run)


@pytest.mark.parametrize(
    "tree", [Tree.dynamic(7, 4, 3), Tree.static([(0,), (1,), (0, 0), (0, 1), (0, 0, 0)])], ids=["dynamic", "static"]
)
def test_trees(tree: Tree) -> None:
    nodes = int(tree)

    def whole(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int64)

    def run() -> None:
        tokens, chances, parents = whole(ROWS, 12), torch.zeros(ROWS, 12), whole(ROWS, 12)
        ranked(tokens, chances, parents, nodes)
        of_independent(whole(ROWS, 3, 4), torch.zeros(ROWS, 3, 4), nodes)
        drafts, of = whole(ROWS, nodes), whole(ROWS, nodes + 1)
        fit(tree, tokens, parents, slots(), slots())
        if tree.parents is not None:
            static_form(tree, tokens, chances, slots())
        path, accepted = torch.ops.speccompile.walk_tree(whole(ROWS, nodes + 1), drafts, of, tree.depth)
        next_node(drafts, of, slots(), whole(ROWS, 1), slots().bool(), slots())
        chain_in_tree(drafts, of, path, accepted, others=other_branches(tree))
        rows_on_path(torch.zeros(ROWS, nodes + 1, 5), path)
        positions_of_nodes(first_place(slots(), slots(), ahead=1, most=30), levels=(1, 2, 2))
        level = next_level(whole(ROWS, 2, 3), torch.zeros(ROWS, 2, 3), torch.zeros(ROWS, 2), whole(ROWS, 2), 1)
        for fixed in ((), (0, 2)):
            read, _, _, came_from = choose_nodes(*level[:2], 2, fixed, 3)
        with_nodes(read, came_from, read, came_from, 0)
        rows_on_path(torch.zeros(ROWS, 2, 5), came_from)
        likeliest_tree(*level, slots(), slots(), slots(), (1, 1, 1, 2, 2, 2), 30, nodes)
        kept = (whole(SIZES[N], nodes), whole(SIZES[N], nodes), whole(SIZES[N], nodes), whole(SIZES[N]))
        store_tree_(*kept, slots(), drafts, of, of, accepted)
        stored = stored_tree(*kept, slots(), nodes)
        proposed_or_stored_tree(kept[3], slots(), *stored, *stored)
        chain_parents(accepted, nodes)

    without_values(run)


def test_what_waits_is_found() -> None:
    with pytest.raises(RuntimeError, match="item"):
        without_values(lambda: int(torch.zeros(3).max()))
    with pytest.raises(NotImplementedError, match="nonzero"):
        without_values(lambda: torch.zeros(3).nonzero())
    for run in (
        lambda: torch.zeros(3, device="cpu").to("meta"),
        lambda: torch.zeros(3).copy_(torch.ones(3, device="cpu")),
    ):
        with pytest.raises(AssertionError, match="between the host and the device"):
            without_values(run)

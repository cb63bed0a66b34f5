"""A ready drafter's tree of draft tokens, proposed at the end of a step for the step after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL
from speccompile.ops.draft_rows import form_of, rows_of
from speccompile.ops.stored_trees import store_proposed_tree_
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.propose import Part, ProposeFunction, checked, tracing


@dataclass(frozen=True)
class ProposeTree(Pass):
    """Traces ``propose(tokens, length, *own, nodes=P)`` into the step and keeps the result: tokens and parents
    ``[B, P]``, and how many there are, ``[B]``. It runs after the drafter's chain was proposed.

    Args:
        propose: see :meth:`speccompile.modes.ready_mode.ReadyMode.propose_tree`.
        state: names of the mode's own state tensors, which it receives whole after the rows' slots ``[B]``.
        scored: it also returns the drafts' probabilities, float32 ``[B, P]``, which the step does not keep.
    """

    propose: ProposeFunction
    state: tuple[str, ...] = ()
    scored: bool = False

    name: ClassVar[str] = "propose_tree"
    looks_for: ClassVar[str] = "committed tokens"
    region: ClassVar[PassRegion] = "propose"
    requires: ClassVar[Facts] = facts("committed", "proposed")
    provides: ClassVar[Facts] = facts("tree_proposed")

    def run(self, graph: StepGraph) -> Changes:
        slots, function = graph.values["slots"], form_of(rows_of, graph.facts)
        text = [graph.insert(function, graph.state(name), slots) for name in ("tokens", "length")]
        own = [*self.read(graph), *[graph.state(name) for name in self.state]]
        longest = graph.layout.max_draft_len
        options: dict[str, Any] = {"propose": self.propose, "longest": longest, "scored": self.scored}
        options["stateful"] = bool(self.state)
        with tracing(self.propose):
            found = graph.insert(proposed_tree, *text, slots, *own, **options)
        kept = [graph.state(name) for name in PROPOSAL]
        graph.insert(form_of(store_proposed_tree_, graph.facts), *kept, slots, *found)
        return Changes(1, f"up to {longest} draft tokens for the next step")

    def read(self, graph: StepGraph) -> list[fx.Node]:
        """Values of the step that ``propose`` receives in addition to tokens and length; none by default."""
        return []


def proposed_tree(
    tokens: torch.Tensor,
    length: torch.Tensor,
    slots: torch.Tensor,
    *own: torch.Tensor,
    propose: ProposeFunction,
    longest: int,
    stateful: bool,
    scored: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A proposal for the rows of these texts, ``tokens`` ``[B, S]`` and ``length`` ``[B]``: draft tokens and parents,
    int64 ``[B, P]``, and their number ``[B]``. ``stateful``: ``propose`` receives the ``slots`` ``[B]`` before its
    ``own`` state; ``scored``: it returns scores."""
    state = (slots, *own) if stateful else own
    rows = slots.shape[0]
    parts = [Part(what, (rows, longest), torch.int64) for what in ("draft tokens", "parents")]
    parts.append(Part("counts", (rows,), torch.int64))
    parts += [Part("scores", (rows, longest), torch.float32)] * scored
    found, parents, count, *_ = checked(propose(tokens, length, *state, nodes=longest), parts)
    return found, parents, count

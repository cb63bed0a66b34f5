"""A ready drafter's tree of draft tokens, proposed at the end of a step for the step after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from speccompile.graph.step_graph import StepGraph
from speccompile.graph.tree import PROPOSAL
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
        text = [graph.state(name) for name in ("tokens", "length", *PROPOSAL)]
        own = [*self.read(graph), *[graph.state(name) for name in self.state]]
        longest = graph.layout.max_draft_len
        options: dict[str, Any] = {"propose": self.propose, "longest": longest, "scored": self.scored}
        options["stateful"] = bool(self.state)
        with tracing(self.propose):
            graph.insert(propose_and_store, *text, graph.values["slots"], *own, **options)
        return Changes(1, f"up to {longest} draft tokens for the next step")

    def read(self, graph: StepGraph) -> list[fx.Node]:
        """Values of the step that ``propose`` receives in addition to tokens and length; none by default."""
        return []


def propose_and_store(
    tokens: torch.Tensor,
    length: torch.Tensor,
    tree_tokens: torch.Tensor,
    tree_parents: torch.Tensor,
    tree_count: torch.Tensor,
    slots: torch.Tensor,
    *own: torch.Tensor,
    propose: ProposeFunction,
    longest: int,
    stateful: bool,
    scored: bool,
) -> None:
    """Keep in ``tree_tokens``, ``tree_parents`` ``[N, P]`` and ``tree_count`` ``[N]`` what ``propose`` returns for the
    rows ``slots`` ``[B]``; ``stateful``: it receives the slots before its ``own`` state, ``scored``: it returns
    scores."""
    state = (slots, *own) if stateful else own
    rows = slots.shape[0]
    parts = [Part(what, (rows, longest), torch.int64) for what in ("draft tokens", "parents")]
    parts.append(Part("counts", (rows,), torch.int64))
    parts += [Part("scores", (rows, longest), torch.float32)] * scored
    found, parents, count, *_ = checked(propose(tokens[slots], length[slots], *state, nodes=longest), parts)
    proposed = found, parents, count.clamp(min=0, max=longest)
    for kept, value in zip((tree_tokens, tree_parents, tree_count), proposed, strict=True):
        kept.index_put_((slots,), value)

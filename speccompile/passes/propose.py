"""A ready drafter proposes at the end of a step, from committed state, for the step after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from speccompile.errors import PassError
from speccompile.graph_capture.graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, facts
from speccompile.passes.drafts import useful_lens

ProposeFunction = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class Propose(Pass):
    """Traces ``propose(tokens, length, *state, draft_len=Kmax)`` into the step and keeps the result for the next one.

    Args:
        propose: takes the rows' ``tokens [B, S]``, their ``length [B]``, and the mode's own state tensors whole;
            returns draft tokens ``[B, Kmax]`` and how many of them count, ``[B]``.
        state: names of the mode's own state tensors.
    """

    propose: ProposeFunction
    state: tuple[str, ...] = ()

    name: ClassVar[str] = "propose"
    looks_for: ClassVar[str] = "committed tokens"
    requires: ClassVar[Facts] = facts("committed")
    provides: ClassVar[Facts] = facts("proposed")

    def run(self, graph: StepGraph) -> Changes:
        core = [graph.state(name) for name in ("tokens", "length", "limit", "draft_tokens", "draft_lens")]
        own = [graph.state(name) for name in self.state]

        def propose_and_store(
            tokens: torch.Tensor,
            length: torch.Tensor,
            limit: torch.Tensor,
            draft_tokens: torch.Tensor,
            draft_lens: torch.Tensor,
            slots: torch.Tensor,
            *own_state: torch.Tensor,
        ) -> tuple[torch.Tensor, torch.Tensor]:
            longest = graph.layout.max_draft_len
            drafts, lens = self.propose(tokens[slots], length[slots], *own_state, draft_len=longest)
            draft_tokens.index_put_((slots,), drafts)
            useful = useful_lens(lens.clamp(max=longest), length[slots], limit[slots])
            draft_lens.index_put_((slots,), useful)
            return drafts, lens

        drafts, lens = graph.insert(propose_and_store, *core, graph.values["slots"], *own)
        self._check(graph, drafts, lens)
        return Changes(1, f"up to {drafts.meta['val'].shape[1]} draft tokens for the next step")

    def _check(self, graph: StepGraph, drafts: fx.Node, lens: fx.Node) -> None:
        rows = graph.sizes["B"]
        expected = [rows, graph.layout.max_draft_len]
        shape, lens_shape = list(drafts.meta["val"].shape), list(lens.meta["val"].shape)
        if shape != expected or lens_shape != [rows] or drafts.meta["val"].dtype != torch.int64:
            raise PassError(
                f"the drafter proposed {drafts.meta['val'].dtype}{shape} with lengths {lens_shape}; "
                f"it has to return int64{expected} draft tokens and int64[{rows}] lengths"
            )

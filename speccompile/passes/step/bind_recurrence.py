"""Progress of each row's recurrent state: before the newest token, or after the prompt tokens that were read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.layer_state import ABSORBED
from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class BindRecurrence(Pass):
    """The state absorbs what no later step reads again: in a decode step the tokens before the newest one, in a prompt
    chunk the prompt's tokens. The inputs of the others are kept, and the next step absorbs those that were accepted.

    A row's newest token is read again where its drafts turned its logits into NaN, so it is not absorbed with the
    others.

    Args:
        prompt: the step is a prompt's chunk.
    """

    prompt: bool = False

    name: ClassVar[str] = "bind_recurrence"
    looks_for: ClassVar[str] = "the inputs row_absorbed, row_settled and row_prompt"
    region: ClassVar[PassRegion] = "inputs"
    requires: ClassVar[Facts] = facts("target_inputs")
    provides: ClassVar[Facts] = facts("recurrence_bound")

    def run(self, graph: StepGraph) -> Changes:
        state = [graph.state(name) for name in (ABSORBED, "length", "prompt_length")]
        values = [graph.values[name] for name in ("slots", "positions")]
        absorbed, settled, of_prompt = graph.insert(
            advance,
            *state,
            *values,
            before=graph.anchors.start,
            prompt=self.prompt,
            kept=graph.layout.max_width,
        )
        bound = {"row_absorbed": absorbed, "row_settled": settled, "row_prompt": of_prompt}
        read = [name for name in bound if name in graph.ports]
        for name in read:
            graph.bind_input(name, bound[name])
        return Changes(len(read), f"the state of each slot, up to {ABSORBED!r}")


def advance(
    absorbed_length: torch.Tensor,
    length: torch.Tensor,
    prompt_length: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    prompt: bool,
    kept: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers of tokens that the state of each row has absorbed, that it is to absorb, and that are its prompt's, all
    int64 ``[B]``.

    Args:
        absorbed_length, length, prompt_length: int64 ``[N]``; the first one is written.
        slots: int64 ``[B]``; positions: int64 ``[B, T]``.
        kept: places whose inputs are kept.
    """
    first = positions[:, 0]
    # The dummy slot's may be anything; a request's never is beyond these bounds.
    absorbed = absorbed_length[slots].clamp(min=0)
    absorbed = torch.minimum(torch.maximum(absorbed, first - kept), first)
    settled = first
    if prompt:
        settled = torch.minimum(torch.maximum(length[slots], first), first + positions.shape[1])
    absorbed_length.index_put_((slots,), settled)
    return absorbed, settled, prompt_length[slots]

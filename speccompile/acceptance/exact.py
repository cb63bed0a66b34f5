"""``exact``: a draft is accepted while it equals the token that the target chooses at that position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from speccompile.acceptance.base import Rule
from speccompile.graph.step_form import StepForm
from speccompile.passes.base import Pass
from speccompile.passes.step.drawn_accept import DrawnAccept, TreeDrawnAccept
from speccompile.passes.step.greedy_accept import GreedyAccept
from speccompile.passes.step.sample import ExactAccept, ProcessLogits
from speccompile.passes.step.tree_accept import TreeExactAccept, TreeGreedyAccept


@dataclass(frozen=True)
class Exact(Rule):
    """Compute y_i = argmax(log p_i + gumbel_i), and accept drafts while x_i = y_i. Greedy decoding has no noise.

    The noise gumbel_i depends on the seed and the position. The rule is lossless for any drafts. If a drafter draws x_i
    from q_i with the same gumbel_i, the probability of acceptance is between (1 - TV) / (1 + TV) and 1 - TV. TV is the
    total variation distance of p_i and q_i.
    """

    name: ClassVar[str] = "exact"
    lossless: ClassVar[bool] = True
    text_invariant: ClassVar[bool] = True
    judges_trees: ClassVar[bool] = True
    draws_without_scores: ClassVar[bool] = True

    def passes(self, form: StepForm) -> list[Pass]:
        kind, tree = form.kind, form.tree
        if kind == "drawn":
            return [DrawnAccept() if tree is None else TreeDrawnAccept(tree)]
        if kind == "greedy":
            return [GreedyAccept() if tree is None else TreeGreedyAccept(tree)]
        return [ProcessLogits(), ExactAccept()] if tree is None else [TreeExactAccept(tree)]

    def explain(self) -> str:
        return "a draft token stays while it is what the target would have chosen without it"

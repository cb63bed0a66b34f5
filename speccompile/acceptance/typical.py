"""``typical``: a draft is accepted if its probability exceeds a bound that depends on the entropy. Lossy.

Cai et al., "Medusa" (2024), section 3.3.2; medusa/model/utils.py, ``evaluate_posterior`` (the fast variant).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from speccompile.acceptance.base import Rule
from speccompile.acceptance.lossy import keep_passes, number_problem
from speccompile.errors import InvalidOption
from speccompile.graph.step_form import StepForm
from speccompile.passes.base import Pass


@dataclass(frozen=True)
class Typical(Rule):
    """Accept drafts while p(x) > min(threshold, alpha * exp(-H(p))), H the entropy of p in nats.

    p is the distribution after all of the request's logits processors, including its temperature. The token after the
    accepted drafts is the target's own. The emitted tokens and their distribution depend on the drafts.

    Args:
        threshold: Medusa's posterior threshold, in 0 .. 1.
        alpha: Medusa's posterior alpha, at least 0.
    """

    threshold: float = 0.3
    alpha: float = 0.09

    name: ClassVar[str] = "typical"
    lossless: ClassVar[bool] = False
    text_invariant: ClassVar[bool] = False
    judges_trees: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name, value, most in (("threshold", self.threshold, 1.0), ("alpha", self.alpha, float("inf"))):
            if problem := number_problem(value, most):
                raise InvalidOption(where="acceptance 'typical'", name=name, value=value, reason=problem)

    def passes(self, form: StepForm) -> list[Pass]:
        return keep_passes(partial(likely_enough, threshold=self.threshold, alpha=self.alpha), form)

    def explain(self) -> str:
        return f"a draft token stays while p > min({self.threshold:g}, {self.alpha:g} exp(-H))"


def likely_enough(
    scores: torch.Tensor,
    drafts: torch.Tensor,
    text: torch.Tensor,
    length: torch.Tensor,
    *,
    threshold: float,
    alpha: float,
) -> torch.Tensor:
    """Whether each draft is accepted, bool ``[B, K]``."""
    log_probs = scores[:, : drafts.shape[1]].float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).nansum(-1)
    bound = (alpha * (-entropy).exp()).clamp(max=threshold)
    ids = drafts.clamp(0, scores.shape[-1] - 1)[..., None]
    return log_probs.gather(-1, ids)[..., 0].exp() > bound

"""Recording of log-probabilities, logits and scores of a step, for requests that need them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts


@dataclass(frozen=True)
class RecordLogprobs(Pass):
    """Writes ``token_logprobs`` ``[N, K+1]``: of each token that is emitted if all of them are, the log-softmax of the
    target's own logits. -1 (no token) counts as token 0; nothing of that place is ever emitted."""

    name: ClassVar[str] = "record_logprobs"
    looks_for: ClassVar[str] = "logits and chosen tokens"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "accepted")
    provides: ClassVar[Facts] = facts("logprobs_recorded")

    def run(self, graph: StepGraph) -> Changes:
        names = ("logits", "target_tokens", "slots")
        graph.insert(record_logprobs, graph.state("token_logprobs"), *[graph.values[name] for name in names])
        return Changes(1)


@dataclass(frozen=True)
class RecordScores(Pass):
    """Writes ``kept_logits`` and ``kept_scores`` ``[N, K+1, V]``: the target's own logits at each position, and the
    scores after all processors, before any noise; and ``kept_drafts`` ``[N, K]``, the drafts of a chain.
    """

    name: ClassVar[str] = "record_scores"
    looks_for: ClassVar[str] = "logits and scores"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "scores")
    provides: ClassVar[Facts] = facts("scores_recorded")

    def run(self, graph: StepGraph) -> Changes:
        for source in ("logits", "scores"):
            graph.insert(record, graph.state(f"kept_{source}"), graph.values[source], graph.values["slots"])
        drafts = graph.values.get("drafts")
        if drafts is None or "parents" in graph.values or not drafts.meta["val"].shape[1]:
            return Changes(2)
        graph.insert(record, graph.state("kept_drafts"), drafts, graph.values["slots"])
        return Changes(3)


def record_logprobs(
    token_logprobs: torch.Tensor, logits: torch.Tensor, target_tokens: torch.Tensor, slots: torch.Tensor
) -> None:
    """Write the log-probabilities of ``target_tokens`` ``[B, K+1]`` by ``logits`` ``[B, K+1, V]`` to the state ``[N,
    Kmax+1]``.
    """
    record(token_logprobs, logprobs_of(logits, target_tokens), slots)


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """float32 ``[B, T]``, of ``tokens`` ``[B, T]`` by ``logits`` ``[B, T, V]``."""
    logprobs = logits.log_softmax(-1, dtype=torch.float32)
    return logprobs.gather(-1, tokens.clamp(min=0)[..., None])[..., 0]


def record(state: torch.Tensor, values: torch.Tensor, slots: torch.Tensor) -> None:
    """``values`` ``[B, T, ...]`` into the first T places of the rows' slots in ``state`` ``[N, Tmax, ...]``."""
    places = torch.arange(values.shape[1], device=values.device)
    state.index_put_((slots[:, None], places), values.to(state.dtype))

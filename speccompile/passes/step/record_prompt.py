"""Log-probabilities of a prompt's own tokens, for requests with ``prompt_logprobs``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from speccompile.graph.step_graph import StepGraph
from speccompile.passes.base import Changes, Facts, Pass, PassRegion, facts
from speccompile.passes.step.record_scores import logprobs_of


@dataclass(frozen=True)
class RecordPrompt(Pass):
    """Writes ``chunk_logprobs`` ``[W]``: of each place of a prompt's chunk the log-probability of the token after it.
    What lies after the prompt's last token means nothing. ``chunk_best`` and ``chunk_best_logprobs``
    ``[W, PROMPT_TOP]`` are the likeliest tokens after each place, the likeliest first, and their log-probabilities.

    A second lm_head reads the whole chunk. The one that chooses the first new token still reads one position: the
    choice does not depend on whether log-probabilities are requested.
    """

    name: ClassVar[str] = "record_prompt"
    looks_for: ClassVar[str] = "the hidden states of a chunk"
    region: ClassVar[PassRegion] = "choose"
    requires: ClassVar[Facts] = facts("step_logits", "last_index")
    provides: ClassVar[Facts] = facts("prompt_recorded")

    def run(self, graph: StepGraph) -> Changes:
        whole = {graph.anchors.final_norm: graph.values["chunk_hidden"]}
        logits = graph.splice(graph.values["logits"], whole, before=graph.output)
        state = [graph.state(name) for name in ("chunk_logprobs", "chunk_best", "chunk_best_logprobs", "tokens")]
        graph.insert(record_prompt, *state, logits, graph.values["positions"], graph.values["slots"])
        return Changes(1, "lm_head on all positions")


def record_prompt(
    chunk_logprobs: torch.Tensor,
    chunk_best: torch.Tensor,
    chunk_best_logprobs: torch.Tensor,
    tokens: torch.Tensor,
    logits: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Write the log-probabilities by ``logits`` ``[1, T, V]`` of the tokens after ``positions`` ``[1, T]`` in
    ``tokens`` ``[N, S]`` to the state ``[W]``, T <= W; also the likeliest tokens after each position.
    """
    following = tokens[slots[:, None], (positions + 1).clamp(max=tokens.shape[1] - 1)]
    width, (best, tokens_of_best) = logits.shape[1], logits.to(torch.float32).topk(chunk_best.shape[1])
    chunk_logprobs[:width] = logprobs_of(logits, following)[0]
    chunk_best[:width] = tokens_of_best[0]
    chunk_best_logprobs[:width] = (best - logits.to(torch.float32).logsumexp(-1, keepdim=True))[0]

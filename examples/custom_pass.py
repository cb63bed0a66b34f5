"""A pass of your own: it records how uncertain the model is about each token. Run it: python examples/custom_pass.py"""

import torch

import speccompile
from speccompile import pretrained
from speccompile.graph.state import N, S
from speccompile.passes import Changes, Pass, StateSpec, StepGraph, facts


class RecordEntropy(Pass):
    """The entropy (nats) of the target's distribution at every judged place."""

    name, looks_for = "record_entropy", "logits"
    requires, provides = facts("step_logits"), facts("entropy_recorded")
    after = ("verify_inputs", "mixed_inputs")  # mixed tiers have the latter

    def state_specs(self) -> list[StateSpec]:
        return [StateSpec("entropy", (N, S), torch.float32, reset=False)]  # it follows the text, as KV does

    def run(self, graph: StepGraph) -> Changes:
        state = graph.state("entropy"), graph.state("length")
        graph.insert(record, *state, graph.values["slots"], graph.values["logits"])
        return Changes(1)


def record(entropy: torch.Tensor, length: torch.Tensor, slots: torch.Tensor, logits: torch.Tensor) -> None:
    """``entropy [N, S]``, ``length [N]``, ``slots [B]``, ``logits [B, K+1, V]``."""
    places = length[slots][:, None] + torch.arange(logits.shape[1], device=logits.device)
    entropy.index_put_((slots[:, None], places), torch.special.entr(logits.float().softmax(-1)).sum(-1))


if __name__ == "__main__":
    model, tokenizer = pretrained.load("smollm2")
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with speccompile.wrap(model, "ngram", passes=[RecordEntropy()], backend="eager", max_len=256) as spec:
        text = spec.generate(ids, max_new_tokens=24)[0]
        for place in range(ids.shape[1] + 1, len(text)):
            print(f"{spec.arena['entropy'][0, place]:6.2f}  {tokenizer.decode(text[place])!r}")

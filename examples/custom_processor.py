"""A sampling processor of your own: no token occurs more than ``max_count`` times. Drafts stay possible.

Run it: python examples/custom_processor.py
"""

import torch

import speccompile
from speccompile import pretrained
from speccompile.sampling import N, Option, Processor, StateSpec, whole


class MaxCount(Processor):
    """Forbids tokens that occur ``max_count`` times in the sequence already, prompt included."""

    name = "max_count"
    options = (Option("max_count", whole(1)),)
    state = (StateSpec("max_count", (N,), torch.int64),)  # 0, where the request says nothing

    def place(self, values, prompt_length):
        return {"max_count": values["max_count"]}

    def apply(self, scores, context, length, limit):
        """``scores [B, T, V]``, ``context [B, S]`` with the drafts (-1: none), ``length [B]``, ``limit [B]``."""
        ends = length[:, None] + torch.arange(scores.shape[1], device=length.device)
        before = torch.arange(context.shape[1], device=length.device) < ends[..., None]
        tokens = context.clamp(min=0)[:, None].expand_as(before)
        counts = torch.zeros_like(scores, dtype=torch.int64).scatter_add_(2, tokens, before.long())
        limit = limit[:, None, None]
        scores.masked_fill_((limit > 0) & (counts >= limit), float("-inf"))


speccompile.register_processor(MaxCount(), after="frequency_penalty")

if __name__ == "__main__":
    model, tokenizer = pretrained.load("smollm2")
    ids = tokenizer("The sun rises in the east. The sun sets in the", return_tensors="pt").input_ids
    with speccompile.wrap(model, "ngram", backend="eager", max_len=256) as spec:
        for options in ({}, {"max_count": 4}):
            text = spec.generate(ids, max_new_tokens=24, **options)[0]
            print(options, repr(tokenizer.decode(text)))

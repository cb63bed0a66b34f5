"""Support for draft models whose vocabulary is the target's, padded to another size.

Example: Qwen2.5's models have one tokenizer with 151,665 tokens. The embeddings of the small models have 151,936 rows,
and those of the large ones 152,064.
"""

from __future__ import annotations

import torch
from torch import fx
from torch.nn.functional import pad

from speccompile.graph.step_graph import StepGraph


def known_tokens(graph: StepGraph, tokens: fx.Node, drafter: StepGraph, before: fx.Node) -> fx.Node:
    """``tokens`` ``[B, T]``, at most the drafter's last token. Only padding of the target's vocabulary can exceed
    it."""
    own = drafter.layout.vocab_size
    if own >= graph.layout.vocab_size:
        return tokens
    known: fx.Node = graph.insert(at_most, tokens, before=before, most=own - 1)
    return known


def over_target(graph: StepGraph, logits: fx.Node, before: fx.Node) -> fx.Node:
    """``logits`` ``[B, T, Vd]`` as logits over the target's vocabulary, ``[B, T, V]``.

    Tokens that only the target has get -inf. Tokens that only the drafter has are cut off.
    """
    vocab_size = graph.layout.vocab_size
    if logits.meta["val"].shape[-1] == vocab_size:
        return logits
    fitted: fx.Node = graph.insert(fit_vocabulary, logits, before=before, vocab_size=vocab_size)
    return fitted


def at_most(tokens: torch.Tensor, *, most: int) -> torch.Tensor:
    return tokens.clamp(max=most)


def fit_vocabulary(logits: torch.Tensor, *, vocab_size: int) -> torch.Tensor:
    """``[B, T, Vd]`` cut to ``[B, T, V]``, or padded with minus infinity."""
    missing = vocab_size - logits.shape[-1]
    return pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size].contiguous()

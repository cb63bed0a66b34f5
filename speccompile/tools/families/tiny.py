"""Tiny random models of the causal-LM families of transformers. Their output depends on the whole context and repeats
itself in part."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from speccompile.errors import CannotBeTiny, error_line
from speccompile.tools.families.family import Family, causal_lm_families
from speccompile.tools.families.tiny_config import tiny_config
from speccompile.tools.families.tiny_sizes import TEXT_VOCAB, VOCAB

__all__ = ["TEXT_VOCAB", "VOCAB", "Family", "causal_lm_families", "tiny_config", "tiny_model"]


def tiny_model(
    family: Family, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> PreTrainedModel:
    """Create a model of the family with random weights, in eval mode. It never ends a text.

    Args:
        family: the family.
        seed: seed of the weights. The caller's random state does not change.
        dtype: of the weights.
        **overrides: arguments of ``tiny_config``, also ``num_layers`` and ``window``.
    """
    config = tiny_config(family, **overrides)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            model = family.model_class._from_config(config, dtype=dtype).eval()
            _draw(model)
            _favour_cycles(model)
        except Exception as error:
            raise CannotBeTiny(family=family.name, reason=error_line(error)) from error
    # Remove defaults of the family that end a text or forbid tokens of the prompt.
    ends = ("eos_token_id", "pad_token_id", "forced_eos_token_id", "forced_bos_token_id")
    for name in (*ends, "encoder_no_repeat_ngram_size"):
        setattr(model.generation_config, name, None)
    return model


# Gain of the outputs of linear layers and of the entries of embeddings, measured over all families. With larger gains
# text never repeats; with smaller ones only the newest token decides.
GAIN = 1.1
EMBEDDING = 1.0


def _draw(model: PreTrainedModel) -> None:
    """Draw weights with which logits depend on the whole context. With the usual 0.02 they are almost constant."""
    transposed = {id(module.weight) for module in model.modules() if isinstance(module, Conv1D)}
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape)
        if id(weight) in tables:
            weight.copy_(noise * EMBEDDING)
        elif weight.dim() < 2 or name.endswith("bias") or not _is_random(weight):
            weight.copy_(weight.float() + noise * 0.1)
        elif weight.dim() == 3:
            # Experts, in either layout, or a convolution.
            weight.copy_(noise * GAIN / min(weight.shape[1:]) ** 0.5)
        else:
            fan_in = weight.shape[0] if id(weight) in transposed else weight[0].numel()
            weight.copy_(noise * GAIN / fan_in**0.5)
    for name, buffer in model.named_buffers():
        if name.endswith("bias") and buffer.is_floating_point():
            buffer.copy_(buffer.float() + torch.randn(buffer.shape) * 0.1)


def _is_random(weight: torch.Tensor) -> bool:
    """Return whether the values were drawn around zero. Others, such as rates of decay, must stay near their values."""
    weight = weight.float()
    return bool(weight.mean().abs() <= 0.5 * weight.std())


TEXTS = 9
CYCLE = 6
SHARE = 0.82
CONTEXT = 0.4


def _favour_cycles(model: PreTrainedModel) -> None:
    """Favour short cycles of tokens. The output then repeats itself in part, and some drafts are accepted.

    Each row of the output layer is increased by a detector of the hidden states of the token that precedes the row's
    token in its cycle. The detectors are as strong as needed to win at a share ``SHARE`` of random positions. The
    embedding is scaled down until the context influences the hidden states, too.
    """
    head: nn.Module | None = model.get_output_embeddings()
    embedding: Any = model.get_input_embeddings()
    if not isinstance(head, nn.Linear) or head.weight is embedding.weight:
        return
    vocab = min(TEXT_VOCAB, head.weight.shape[0])
    texts = torch.stack([torch.randperm(vocab) for _ in range(TEXTS)])
    for _ in range(8):
        hidden = _head_inputs(model, head, texts)
        by_token = torch.stack([states[text.argsort()] for states, text in zip(hidden, texts, strict=True)])
        means = by_token[1:].mean(0)
        if (by_token[1:] - means).std() >= CONTEXT * (means - means.mean(0)).std():
            break
        embedding.weight.mul_(0.6)
    detectors = nn.functional.normalize(means - means.mean(0), dim=-1)
    tokens = torch.arange(vocab)
    following = (tokens - tokens % CYCLE + (tokens + 1) % CYCLE).clamp(max=vocab - 1)
    base = head.weight.float()
    base[vocab:] = 0
    cycles = torch.zeros_like(base)
    cycles[following] = detectors
    for strength in torch.logspace(-2, 2, 40):
        weight = base + strength * cycles
        if ((by_token[0] @ weight.T).argmax(-1) == following).float().mean() >= SHARE:
            break
    # Logits of this size avoid the flat ends of a soft cap, where all would be equal.
    head.weight.copy_(weight * 2 / (by_token[0] @ weight.T).std())


def _head_inputs(model: PreTrainedModel, head: nn.Linear, texts: torch.Tensor) -> torch.Tensor:
    """Hidden states ``[texts, tokens, hidden]`` that the output layer receives."""
    seen: list[torch.Tensor] = []
    handle = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].float()))
    try:
        model(texts, use_cache=False)
    finally:
        handle.remove()
    # A model that predicts several tokens at once has a stream of hidden states for each.
    return seen[0].reshape(len(texts), -1, texts.shape[1], head.in_features)[:, 0]

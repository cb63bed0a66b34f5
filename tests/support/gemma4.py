"""Small Gemma 4 targets and assistants, and transformers' own drafts of them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from transformers import DynamicCache, Gemma4ForCausalLM, Gemma4TextConfig
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM

from speccompile.heads import Gemma4AssistantHead

Weights = dict[str, torch.Tensor]
SLIDING, FULL = "sliding_attention", "full_attention"
VOCAB, HIDDEN = 96, 64
TEXT: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=96,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    global_head_dim=32,
    num_hidden_layers=4,
    layer_types=[SLIDING, FULL] * 2,
    num_kv_shared_layers=2,
    sliding_window=8,
    max_position_embeddings=256,
    hidden_size_per_layer_input=8,
    vocab_size_per_layer_input=VOCAB,
    pad_token_id=0,
    eos_token_id=None,
)
#: As the config.json of google's assistants.
ASSISTANT: dict[str, Any] = dict(
    architectures=["Gemma4AssistantForCausalLM"],
    model_type="gemma4_assistant",
    backbone_hidden_size=HIDDEN,
    use_ordered_embeddings=False,
    num_centroids=12,
    centroid_intermediate_top_k=5,
    tie_word_embeddings=True,
    text_config=dict(
        TEXT,
        model_type="gemma4_text",
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        layer_types=[SLIDING, SLIDING, FULL],
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=0,
    ),
)


def target(**fields: Any) -> Gemma4ForCausalLM:
    """A target whose norms and scalars change what they read."""
    torch.manual_seed(0)
    model = Gemma4ForCausalLM(Gemma4TextConfig(**(TEXT | fields))).eval()
    vary(model.state_dict())
    return model


def vary(weights: Weights) -> None:
    generator = torch.Generator().manual_seed(3)
    for name, value in weights.items():
        if "norm" in name or "layer_scalar" in name:
            value.copy_(1 + 0.3 * torch.randn(value.shape, generator=generator))


def assistant_config(**fields: Any) -> dict[str, Any]:
    """A config.json. ``fields`` that are of the text config override those."""
    text = {key: fields.pop(key) for key in list(fields) if key in ASSISTANT["text_config"]}
    return {**ASSISTANT, **fields, "text_config": ASSISTANT["text_config"] | text}


def their_assistant(config: dict[str, Any]) -> Gemma4AssistantForCausalLM:
    """transformers' model. Its config's check of layers that share KV refuses assistants in 5.23, and is left out."""
    found = Gemma4TextConfig.kv_sharing_modes
    Gemma4TextConfig.kv_sharing_modes = property(lambda self: ["reuse"] * self.num_hidden_layers)
    try:
        torch.manual_seed(1)
        model = Gemma4AssistantForCausalLM(Gemma4AssistantConfig.from_dict(config)).eval()
    finally:
        Gemma4TextConfig.kv_sharing_modes = found
    state = model.state_dict()
    vary(state)
    generator = torch.Generator().manual_seed(2)
    for value in state.values():
        if value.ndim == 2:
            value.copy_(torch.randn(value.shape, generator=generator) * value.shape[-1] ** -0.5)
    if model.masked_embedding is not None:
        model.masked_embedding.token_ordering.copy_(torch.randperm(VOCAB, generator=generator))
    return model


def weights_of(model: Gemma4AssistantForCausalLM) -> Weights:
    """The tensors of its files."""
    return {key: value.clone() for key, value in model.state_dict().items() if key != "lm_head.weight"}


def small_head(**fields: Any) -> Gemma4AssistantHead:
    """An assistant for :func:`target`, with weights as torch makes them. ``fields`` are its config's."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        return Gemma4AssistantHead(Gemma4AssistantConfig.from_dict(assistant_config(**fields))).eval()


class TheirDrafts:
    """Drafts as of transformers' ``SinglePositionMultiTokenCandidateGenerator``, from a forward over the text."""

    def __init__(self, model: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM, text: list[int]) -> None:
        self._assistant, self._embedding, self._text = assistant, model.get_input_embeddings(), text
        # Without layers that share KV, 5.23 does not return it.
        cache, config = DynamicCache(), model.config
        with torch.no_grad():
            found = model.model(torch.tensor([text[:-1]]), past_key_values=cache)
        own = config.layer_types[: config.num_hidden_layers - config.num_kv_shared_layers]
        self._hidden = found.last_hidden_state[:, -1:]
        self._kv = {kind: (layer.keys, layer.values) for kind, layer in zip(own, cache.layers, strict=False)}
        self.after = functools.cache(self._after)

    def _after(self, path: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits ``[V]`` after the drafts of ``path``, and the hidden state that is handed on."""
        hidden = self.after(path[:-1])[1] if path else self._hidden
        token = torch.tensor([[path[-1] if path else self._text[-1]]])
        with torch.no_grad():
            found = self._assistant(
                inputs_embeds=torch.cat([self._embedding(token), hidden], dim=-1),
                position_ids=torch.tensor([[len(self._text) - 1]]),
                shared_kv_states=self._kv,
                attention_mask=None,
            )
        return found.logits[0, 0], found.last_hidden_state

    def chain(self, count: int) -> tuple[list[int], torch.Tensor]:
        path: tuple[int, ...] = ()
        logits = []
        for _ in range(count):
            logits.append(self.after(path)[0])
            path = (*path, int(logits[-1].argmax()))
        return list(path), torch.stack(logits)

    def tree(self, paths: list[tuple[int, ...]]) -> list[int]:
        """The token of each node of a static tree."""
        tokens: dict[tuple[int, ...], tuple[int, ...]] = {(): ()}
        for path in sorted(paths, key=len):
            before = tokens[path[:-1]]
            best = self.after(before)[0].topk(path[-1] + 1).indices
            tokens[path] = (*before, int(best[-1]))
        return [tokens[path][-1] for path in paths]

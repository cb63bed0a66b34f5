"""The DFlash head as a plain module.

Source: "DFlash: Block Diffusion for Flash Speculative Decoding" (2026, arXiv 2602.06036). transformers'
``MuseGlimmerAssistantModel`` and z-lab's ``DFlashDraftModel`` are such heads.

The context is the tapped hidden states of all positions of the sequence, projected to keys and values of every layer.
The block is the newest token and mask tokens, at the positions after the context. The block runs through the layers
once, and attends to the context and to itself. The output at a mask token predicts the token of that position.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.graph.layer_state import KVShape
from speccompile.graph.step_graph import Route
from speccompile.graph_capture.model_info import decoder_layers
from speccompile.graph_capture.shard_styles import embedded_rows, whole_rows
from speccompile.modes.dflash.attention import BlockAttention, BlockCache
from speccompile.modes.dflash.config import DFlashConfig, check_config, check_target
from speccompile.modes.dflash.convolution import BlockConvolution
from speccompile.modes.dflash.domino import DominoHead
from speccompile.modes.dflash.markov import MarkovHead
from speccompile.modes.dflash.selector import CandidateSelector
from speccompile.modes.network.draft_head import DraftHead, HeadCache
from speccompile.modes.network.layers import MLP, RMSNorm, Rotary, rms_norm, rotated
from speccompile.sampling.draft_vocab import target_ids

SOURCE = "of DFlash"


class DFlashAttention(nn.Module):
    """Attention of a block to the context and to itself."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, bias = layer, config.head_dim, config.attention_bias
        queries = config.num_attention_heads * config.head_dim
        keys = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, keys, bias=bias)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps)
        self.window, self.causal = config.window(layer), config.is_causal(layer)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: BlockAttention) -> torch.Tensor:
        query, key, value = (self._heads(project(x)) for project in (self.q_proj, self.k_proj, self.v_proj))
        query, key = rotated(self.q_norm(query), cos, sin), rotated(self.k_norm(key), cos, sin)
        attend = cache.attend if self.causal else cache.attend_both_ways
        attended = attend(self.layer, query, key, value, self.head_dim**-0.5, self.window)
        out: torch.Tensor = self.o_proj(attended.flatten(2))
        return out

    def of_context(
        self, context: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Key and value ``[B, T, G, D]`` of the context ``[B, T, M]``.

        The modules of the weights are not called: in a captured graph these ops must not belong to a decoder layer.
        """
        key = self._heads(F.linear(context, self.k_proj.weight, self.k_proj.bias))
        value = self._heads(F.linear(context, self.v_proj.weight, self.v_proj.bias))
        return rotated(rms_norm(key, self.k_norm.weight, self.k_norm.eps), cos, sin), value

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DFlashLayer(nn.Module):
    """A decoder layer of the block."""

    def __init__(self, config: DFlashConfig, layer: int) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = DFlashAttention(config, layer)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(config)
        self.convolves = config.conv_kernel_size > 0
        if self.convolves:
            sizes = (size, config.conv_kernel_size, config.conv_group_size)
            self.attention_conv, self.mlp_conv = BlockConvolution(*sizes), BlockConvolution(*sizes)

    def forward(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: BlockAttention
    ) -> torch.Tensor:
        if self.convolves:
            return self._convolved(hidden, cos, sin, cache)
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin, cache)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out

    def _convolved(
        self, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: BlockAttention
    ) -> torch.Tensor:
        given, kernel = self.attention_conv.before(self.input_layernorm(hidden))
        hidden = hidden + self.attention_conv.after(self.self_attn(given, cos, sin, cache), kernel)
        given, kernel = self.mlp_conv.before(self.post_attention_layernorm(hidden))
        return hidden + self.mlp_conv.after(self.mlp(given), kernel)


class DFlashHead(DraftHead):
    """A DFlash head. Its embedding is the target's own module, and so is its lm_head unless it has a draft vocabulary.

    Attributes:
        d2t: int64 ``[Vd]``: draft token i is the target's token ``i + d2t[i]``. None if the head has the target's
            vocabulary.

    Raises:
        InvalidHead: the config is for another target, or its values do not fit together.
    """

    d2t: torch.Tensor | None

    def __init__(self, config: DFlashConfig, target: PreTrainedModel) -> None:
        super().__init__()
        check_config(config, SOURCE)
        check_target(config, SOURCE, target)
        self.config = config
        self.layers_of_target = len(decoder_layers(target)[1])
        size = config.hidden_size
        self.fc = nn.Linear(len(config.taps) * size, size, bias=False)
        self.hidden_norm = RMSNorm(size, config.rms_norm_eps)
        self.layers = nn.ModuleList([DFlashLayer(config, index) for index in range(config.num_hidden_layers)])
        self.norm = RMSNorm(size, config.rms_norm_eps)
        self.rotary = Rotary(config, SOURCE)
        vocab, drafted = whole_rows(target.get_input_embeddings()), config.draft_vocab_size
        self.register_buffer("d2t", torch.zeros(drafted, dtype=torch.int64, device=target.device) if drafted else None)
        if drafted:
            self.lm_head = nn.Linear(size, drafted, bias=False)
        if config.markov_rank:
            self.markov_head = MarkovHead(vocab, drafted or vocab, config.markov_rank)
        if config.selector_rank:
            self.candidate_selector = CandidateSelector(vocab, size, config.selector_rank, config.selector_top_k)
        if config.gru_hidden_dim:
            self.domino_head = DominoHead(size, config.gru_hidden_dim, config.emb_dim, drafted or vocab)
        for own in self.own:
            own.to(target.device, target.dtype).eval()
        self.embed_tokens = target.get_input_embeddings()
        if not drafted:
            self.lm_head = target.get_output_embeddings()
        self.vocab_size = vocab
        self.training = False

    @property
    def own(self) -> list[nn.Module]:
        """The head's modules, without those of the target."""
        own = [self.fc, self.hidden_norm, self.layers, self.norm, self.rotary]
        if self.config.draft_vocab_size:
            own.append(self.lm_head)
        if self.config.markov_rank:
            own.append(self.markov_head)
        if self.config.selector_rank:
            own.append(self.candidate_selector)
        if self.config.gru_hidden_dim:
            own.append(self.domino_head)
        return own

    def own_state(self) -> dict[str, torch.Tensor]:
        """The head's tensors, without those of the target."""
        shared = ("embed_tokens.",) if self.config.draft_vocab_size else ("embed_tokens.", "lm_head.")
        return {name: value for name, value in self.state_dict().items() if not name.startswith(shared)}

    @staticmethod
    def random(target: PreTrainedModel, mask_token_id: int, seed: int = 0, **fields: Any) -> DFlashHead:
        """A head with random weights and the target's sizes, dtype and device. ``fields`` of :class:`DFlashConfig`
        override the sizes. A draft vocabulary is a random part of the target's."""
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            head = DFlashHead(DFlashConfig.for_target(target, mask_token_id, **fields), target)
            for name, parameter in head.own_state().items():
                if parameter.ndim == 2:
                    parameter.copy_(torch.randn(parameter.shape) * parameter.shape[1] ** -0.5)
                elif name.endswith("base_kernel"):
                    parameter.copy_(torch.randn(parameter.shape) * 0.5)
                elif name.endswith("bias"):
                    parameter.copy_(torch.randn(parameter.shape) * 0.1)
            if head.d2t is not None:
                size = len(head.d2t)
                head.d2t.copy_(torch.randperm(head.vocab_size)[:size].sort().values - torch.arange(size))
        return head

    def for_texts(self, max_len: int) -> DFlashHead:
        """The head for sequences of up to ``max_len`` tokens. Windows that are longer than a sequence and a block are
        removed."""
        config, reach = self.config, max_len + self.config.block_size
        windows = tuple(None if window is None or window >= reach else window for window in config.windows)
        return self._with(windows=windows if any(windows) else ())

    def with_block(self, block_size: int) -> DFlashHead:
        """A head with the same weights and another block size."""
        return self._with(block_size=block_size)

    def _with(self, **fields: Any) -> DFlashHead:
        if all(getattr(self.config, name) == value for name, value in fields.items()):
            return self
        head = copy.copy(self)
        head._modules = dict(self._modules)
        head.config = replace(self.config, **fields)
        layers = [copy.copy(layer) for layer in self.layers]
        for index, layer in enumerate(layers):
            attention = copy.copy(cast(DFlashLayer, layer).self_attn)
            attention.window = head.config.window(index)
            layer._modules = {**layer._modules, "self_attn": attention}
        head.layers = nn.ModuleList(layers)
        return head

    @property
    def hidden_size(self) -> int:
        """The size of the concatenated hidden states that the head reads, ``taps * M``."""
        return len(self.config.taps) * self.config.hidden_size

    @property
    def kv(self) -> dict[int, KVShape]:
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        return {index: KVShape(shape, shape, self.fc.weight.dtype) for index in range(len(self.layers))}

    @property
    def route(self) -> Route:
        windowed = [window and not self.config.is_causal(index) for index, window in enumerate(self.config.windows)]
        return "eager" if windowed and all(windowed) else "attention"

    @property
    def numbers(self) -> set[int]:
        config = self.config
        return {self.hidden_size, config.block_size, *(window for window in config.windows if window)}

    @property
    def compared(self) -> tuple[str, ...]:
        config = self.config
        parts = {"bias": config.markov_rank, "scores": config.selector_rank, "corrected": config.gru_hidden_dim}
        return ("logits", *(name for name, size in parts.items() if size))

    @property
    def places_per_row(self) -> int:
        return 2

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, hidden_states: torch.Tensor, cache: HeadCache
    ) -> dict[str, torch.Tensor]:
        """Compute T positions of context, and a block of T tokens after them. Passes copy only one of the two parts.

        Args:
            input_ids: int64 ``[B, T]``, the block.
            position_ids: ``[B, T]``, consecutive positions of the context.
            hidden_states: ``[B, T, taps * M]``, tapped at these positions.

        Returns:
            Values by name. Those that the config does not need are absent.

            - ``key_0``, ``value_0``, ... ``[B, T, G, D]``: the context's KV of each layer.
            - ``block_positions`` ``[B, T]``.
            - ``normed`` ``[B, T, M]``: the input of the lm_head.
            - ``logits`` ``[B, T, Vd]`` of the block's tokens.
            - ``bias`` ``[B, T, Vd]`` of the tokens after ``input_ids``, for their logits.
            - ``selected`` ``[B, T, V]``: the logits of the likeliest tokens after ``input_ids``, by these tokens, -inf
              elsewhere; ``scores``: the same with 0 elsewhere.
            - ``state_before``, ``state`` ``[B, T, gru_hidden_dim]``: Domino's state before and after ``input_ids``;
              ``corrected`` ``[B, T, Vd]``: the logits of the tokens after them.
            - ``target_ids`` ``[Vd]``: the target's ids of all draft tokens.
        """
        named: dict[str, torch.Tensor] = {}
        context = self.context(hidden_states)
        for index, (key, value) in enumerate(self.context_kv(context, position_ids)):
            cache.write(index, key, value)
            named |= {f"key_{index}": key, f"value_{index}": value}
        named["block_positions"] = positions = position_ids + position_ids.shape[1]
        last = positions[:, -1:] + torch.zeros_like(positions)
        block = BlockCache(cache.keys, cache.values, cache.slots, positions, last)
        named["normed"] = self.norm(self.read(self.embed(input_ids), positions, block))
        named["logits"] = self.logits(named["normed"])
        if self.d2t is not None:
            named["target_ids"] = target_ids(self.d2t)
        if self.config.markov_rank:
            named["bias"] = self.markov_head(input_ids)
        if self.config.selector_rank:
            named["selected"] = self.candidate_selector(input_ids, named["normed"], named["logits"])
            named["scores"] = named["selected"].nan_to_num(neginf=0.0)
        if self.config.gru_hidden_dim:
            domino, embedded = self.domino_head, self.embed(input_ids)
            # Without a size of an input, which a copy of this part would need.
            named["state_before"] = torch.zeros_like(embedded[..., :1]).expand(-1, -1, domino.size)
            named["state"] = domino.prefix_gru(embedded, named["state_before"])
            named["corrected"] = named["logits"] + domino.correction(named["normed"], named["state"])
        return named

    # --- parts of the forward ---------------------------------------------------------------------------------

    def context(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The context ``[B, T, M]`` of tapped hidden states ``[B, T, taps * M]``."""
        out: torch.Tensor = self.hidden_norm(self.fc(hidden_states))
        return out

    def context_kv(self, context: torch.Tensor, position_ids: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The context's key and value ``[B, T, G, D]`` of each layer."""
        cos, sin = self.rotary(position_ids, context.dtype)
        return [cast(DFlashLayer, layer).self_attn.of_context(context, cos, sin) for layer in self.layers]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings ``[B, T, M]``: rows of the target's embedding weight, times this head's own scale."""
        embedded = embedded_rows(self.embed_tokens, input_ids)
        return embedded if self.config.embedding_scale == 1.0 else embedded * self.config.embedding_scale

    def read(self, embedded: torch.Tensor, position_ids: torch.Tensor, cache: BlockAttention) -> torch.Tensor:
        """The output of the layers for a block, ``[B, T, M]``."""
        cos, sin = self.rotary(position_ids, embedded.dtype)
        hidden = embedded
        for layer in self.layers:
            hidden = layer(hidden, cos, sin, cache)
        return hidden

    def logits(self, normed: torch.Tensor) -> torch.Tensor:
        """Logits ``[B, T, Vd]`` of normed outputs ``[B, T, M]``, without the bias by the token before."""
        logits: torch.Tensor = self.lm_head(normed)
        if self.config.logit_scale != 1.0:
            logits = logits * self.config.logit_scale
        if self.config.logit_softcap is not None:
            logits = (logits / self.config.logit_softcap).tanh() * self.config.logit_softcap
        return logits


def check_given(head: DFlashHead, target: PreTrainedModel) -> None:
    """Check a head that the caller gave.

    Raises:
        InvalidHead: it is for another target, on another device, of another dtype, or in training mode.
    """
    weight, reason = head.fc.weight, None
    if head.embed_tokens is not target.get_input_embeddings():
        reason = "it shares modules of another target; create it for this one"
    elif (weight.dtype, weight.device) != (target.dtype, target.device):
        reason = f"it must be {target.dtype} on {target.device}, as the target, got {weight.dtype} on {weight.device}"
    elif any(own.training for own in head.own):
        reason = "it is in training mode; call its eval()"
    if reason:
        raise InvalidHead(source="that was given", reason=reason)

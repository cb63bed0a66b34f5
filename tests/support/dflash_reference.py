"""What transformers' own generator drafts with a DFlash head."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.candidate_generator import DFlashTokenCandidateGenerator
from transformers.models.muse_glimmer_assistant.modeling_muse_glimmer_assistant import MuseGlimmerAssistantModel

from speccompile.heads import DFlashConfig, DFlashHead, save_dflash


def assistant_of(head: DFlashHead, folder: Path) -> MuseGlimmerAssistantModel:
    """transformers' model with the head's weights, through its files."""
    dtype = head.fc.weight.dtype
    save_dflash(head, folder, dtype=dtype)
    assistant, info = MuseGlimmerAssistantModel.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return assistant.eval()


class Oracle:
    """The generator beside a text that grows, whatever made it grow."""

    def __init__(self, target: PreTrainedModel, assistant: MuseGlimmerAssistantModel) -> None:
        self.target, self.read = target, 0
        self.generator = DFlashTokenCandidateGenerator(
            assistant,
            target.get_input_embeddings(),
            target.get_output_embeddings(),
            GenerationConfig(max_length=10_000, do_sample=False),
        )

    def drafts(self, text: list[int]) -> list[int]:
        """All of a block, after ``text``. Since the last call ``len(text) - read`` tokens have been added."""
        ids, new = torch.tensor([text]), len(text) - 1 - self.read
        with torch.no_grad():
            states = self.target(ids[:, :-1], output_hidden_states=True).hidden_states
            outputs = SimpleNamespace(hidden_states=[state[:, self.read :] for state in states])
            kwargs = {"position_ids": torch.arange(len(text))[None], "attention_mask": None}
            found, _ = self.generator.get_candidates(ids, kwargs, outputs, False, new - 1)
        self.read = len(text) - 1
        return found[0, len(text) :].tolist()


@contextmanager
def recorded(found: dict[int, list[int]]) -> Iterator[None]:
    """Drafts of every call of the generator, by the length of the text."""
    own = DFlashTokenCandidateGenerator.get_candidates

    def get_candidates(self: Any, input_ids: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        ids, logits = own(self, input_ids, *args, **kwargs)
        if logits is not None:
            found[input_ids.shape[1]] = ids[0, input_ids.shape[1] :].tolist()
        return ids, logits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DFlashTokenCandidateGenerator, "get_candidates", get_candidates)
        yield


def plain_drafts(target: PreTrainedModel, head: DFlashHead, text: list[int]) -> tuple[list[int], torch.Tensor]:
    """All drafts of a block after ``text``, and the logits ``[K, Vd]`` that they are chosen from."""
    outputs: list[torch.Tensor] = []
    logits, drafts = plain_logits(target, head, text, outputs), list[int]()
    for place, row in enumerate(logits):
        before = [*text, *drafts][-1]
        row += after_token(head, before)
        if head.config.selector_rank:
            row[:] = selected(head, before, outputs[0][place], row)
        drafts.append(int(draft_ids(head)[row.argmax()]))
    return drafts, logits


def plain_logits(
    target: PreTrainedModel, head: DFlashHead, text: list[int], outputs: list[torch.Tensor] | None = None
) -> torch.Tensor:
    """Logits ``[K, Vd]`` of a block after ``text``, without the bias by the token before: the head written down once
    more, over the whole context at once and without a cache, after ``DFlashDraftModel`` of z-lab's
    ``dflash/model.py``, and ``DSparkDraftModel`` of speculators."""
    config, weights = head.config, {name: value.double() for name, value in head.own_state().items()}
    outputs = [] if outputs is None else outputs
    with torch.no_grad():
        states = target(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
    tapped = torch.cat([states[tap + 1][0] for tap in config.taps], -1).double()

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).rsqrt() * weights[f"{name}.weight"]

    size, context = config.head_dim, norm(tapped @ weights["fc.weight"].T, "hidden_norm")
    count, total = len(context), len(context) + config.block_size
    frequencies = config.rope["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angles = (torch.arange(total)[:, None] * frequencies).repeat(1, 2)[:, None]

    def turned(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()

    ids = torch.tensor([text[-1]] + [config.mask_token_id] * (config.block_size - 1))
    hidden = target.get_input_embeddings().weight.detach()[ids].double() * config.embedding_scale
    query_at, key_at = torch.arange(count, total)[:, None], torch.arange(total)
    for index in range(config.num_hidden_layers):

        def linear(x: torch.Tensor, part: str, index: int = index) -> torch.Tensor:
            bias = weights.get(f"layers.{index}.{part}.bias", torch.zeros(()).double())
            return x @ weights[f"layers.{index}.{part}.weight"].T + bias

        normed, close = convolved(
            weights, config, index, "attention_conv", norm(hidden, f"layers.{index}.input_layernorm")
        )
        both = torch.cat([context, normed])
        q = norm(linear(normed, "self_attn.q_proj").unflatten(-1, (-1, size)), f"layers.{index}.self_attn.q_norm")
        k = norm(linear(both, "self_attn.k_proj").unflatten(-1, (-1, size)), f"layers.{index}.self_attn.k_norm")
        v = linear(both, "self_attn.v_proj").unflatten(-1, (-1, size))
        repeats = config.num_attention_heads // config.num_key_value_heads
        q, k = turned(q, angles[count:]), turned(k, angles).repeat_interleave(repeats, 1)
        visible = torch.ones(config.block_size, total, dtype=torch.bool)
        if config.is_causal(index):
            visible &= key_at <= query_at
        if window := config.window(index):
            visible &= (query_at - key_at).abs() < window
        scores = torch.einsum("thd,shd->hts", q, k) * size**-0.5
        shares = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        attended = torch.einsum("hts,shd->thd", shares, v.repeat_interleave(repeats, 1)).flatten(1)
        hidden = hidden + close(linear(attended, "self_attn.o_proj"))
        normed, close = convolved(
            weights, config, index, "mlp_conv", norm(hidden, f"layers.{index}.post_attention_layernorm")
        )
        gated = F.silu(linear(normed, "mlp.gate_proj")) * linear(normed, "mlp.up_proj")
        hidden = hidden + close(linear(gated, "mlp.down_proj"))
    whole = target.get_output_embeddings().weight.detach().double()
    first = 0 if config.sample_from_anchor else 1
    outputs.append(norm(hidden, "norm")[first:])
    logits = outputs[-1] @ weights.get("lm_head.weight", whole).T * config.logit_scale
    if config.logit_softcap is not None:
        logits = (logits / config.logit_softcap).tanh() * config.logit_softcap
    return logits


def after_token(head: DFlashHead, token: int) -> torch.Tensor:
    """The bias ``[Vd]`` of the logits after a token."""
    weights = head.own_state()
    if not head.config.markov_rank:
        return torch.zeros(len(draft_ids(head)), dtype=torch.float64)
    first, second = (weights[f"markov_head.markov_{name}.weight"].double() for name in ("w1", "w2"))
    return second @ first[token]


Close = Callable[[torch.Tensor], torch.Tensor]


def convolved(
    weights: dict[str, torch.Tensor], config: DFlashConfig, layer: int, part: str, x: torch.Tensor
) -> tuple[torch.Tensor, Close]:
    """The input ``[T, M]`` of a part of a DFlash2 layer, and what becomes of its output: ``y_t = sum_s (b_s + d_ts)
    x_(t-s)``, where d is projected from the input, by groups of channels."""
    if not config.conv_kernel_size:
        return x, lambda out: out
    base = weights[f"layers.{layer}.{part}.base_kernel"]
    shape = (2, config.conv_kernel_size, -1)
    kernels = (x @ weights[f"layers.{layer}.{part}.kernel_projection.weight"].T).unflatten(-1, shape)

    def run(values: torch.Tensor, side: int) -> torch.Tensor:
        found = torch.zeros_like(values)
        for at in range(len(values)):
            for tap in range(min(config.conv_kernel_size, at + 1)):
                own = kernels[at, side, tap].repeat_interleave(config.conv_group_size)
                found[at] += (base[side, tap] + own) * values[at - tap]
        return found

    return run(x, 0), lambda out: run(out, 1)


def selected(head: DFlashHead, before: int, output: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """Scores ``[V]`` of DFlash2's candidates after the token ``before``, -inf elsewhere."""
    weights = {name: value.double() for name, value in head.own_state().items()}
    first, second, projection = (
        weights[f"candidate_selector.{name}"]
        for name in ("predecessor_codebook", "successor_codebook", "hidden_projection.weight")
    )
    found = torch.full_like(logits, float("-inf"))
    for token in logits.topk(head.config.selector_top_k).indices.tolist():
        found[token] = logits[token] + (first[before] * (projection @ output) * second[token]).sum()
    return found


def draft_ids(head: DFlashHead) -> torch.Tensor:
    """The target's ids of all tokens that the head can draft."""
    if head.d2t is None:
        return torch.arange(len(head.embed_tokens.weight))
    return torch.arange(len(head.d2t)) + head.d2t

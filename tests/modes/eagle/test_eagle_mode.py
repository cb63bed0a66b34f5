"""EAGLE-1 and EAGLE-2 heads in steps: they draft what the paper's head drafts, and the text is the target's."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from speccompile import Speculator, Tree, wrap
from speccompile.errors import InvalidHead, InvalidOption
from speccompile.heads import EagleHead
from speccompile.modes.auto import head_kind
from support.eagle3_specs import drafted
from support.eagle_reference import PlainEagle
from support.errors import raises
from support.shape_texts import texts_by_shapes
from support.tiny import admitted, greedy, tiny_llama

TREE = Tree.dynamic(nodes=6, depth=3, branches=3)
VARIANTS: dict[str, dict[str, Any]] = {
    "Llama 2": {},
    "without a bias": {"bias": False},
    "Qwen2": {"bias": False, "qkv_bias": True, "rope": {"rope_type": "default", "rope_theta": 1e6}},
    "two layers": {"num_hidden_layers": 2, "attention_bias": True, "head_dim": 12},
}
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6], [7], list(range(20, 60))]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Whose final norm changes what it reads."""
    model = tiny_llama(vocab=128)
    with torch.no_grad():
        model.model.norm.weight.uniform_(0.2, 3.0, generator=torch.Generator().manual_seed(0))
    return model


def head_of(model: LlamaForCausalLM, variant: str) -> EagleHead:
    head = EagleHead.random(model, **VARIANTS[variant])
    generator = torch.Generator().manual_seed(1)
    for name, parameter in head.named_parameters():
        if name.endswith("bias") or "layernorm" in name:
            parameter.data.normal_(1.0, 0.3, generator=generator)
    return head


def plain_of(head: EagleHead) -> PlainEagle:
    config = head.config
    sizes = {"theta": config.rope["rope_theta"], "eps": config.rms_norm_eps, "layers": config.num_hidden_layers}
    weights = {key: value.detach() for key, value in head.state_dict().items()}
    return PlainEagle(weights, config.num_attention_heads, config.num_key_value_heads, **sizes)


def states_of(model: LlamaForCausalLM, text: list[int]) -> torch.Tensor:
    """Hidden states ``[n, M]`` of all of a text but its last token, after the final norm."""
    with torch.no_grad():
        return model.model(torch.tensor([text[:-1]])).last_hidden_state[0]


@pytest.fixture(scope="module")
def spec(model: LlamaForCausalLM) -> Iterator[Speculator]:
    options: dict[str, Any] = {"tiers": (0, 3, TREE), "max_batch": 2, "max_len": 80, "backend": "eager"}
    with wrap(model, "eagle", draft=head_of(model, "Llama 2"), policy="fixed:0", **options) as made:
        yield made


@pytest.mark.parametrize("variant", VARIANTS)
def test_drafts_are_those_of_the_paper_s_head(model: LlamaForCausalLM, spec: Speculator, variant: str) -> None:
    """After prompts in chunks, after steps with and without drafts, and after trees."""
    head, made = head_of(model, variant), spec
    if variant != "Llama 2":
        sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 1, "max_len": 80, "backend": "eager"}
        made = wrap(model, "eagle", draft=head, policy="fixed:0", **sizes)
    plain = plain_of(head)
    for prompt in PROMPTS if variant == "Llama 2" else PROMPTS[:1]:
        request = admitted(made.engine, prompt, max_new_tokens=24)
        for tier in (3, 0, 0, TREE if made is spec else 3, 3):
            text = [*prompt, *request.new_tokens]
            drafts, logits = drafted(made, request.slot, 3)
            expected, own = plain.draft(text, states_of(model, text), 3)
            assert drafts == expected
            torch.testing.assert_close(
                logits[:, 0].double() if logits.ndim == 3 else logits.double(), own, rtol=1e-3, atol=1e-3
            )
            made.set_tier(tier)
            made.engine.step()
        request.cancel()
    if made is not spec:
        made.close()


def test_the_text_is_the_targets(model: LlamaForCausalLM, spec: Speculator) -> None:
    expected = [greedy(model, prompt, 20) for prompt in PROMPTS]
    for shapes in ((3,), (TREE,), (0, 3, TREE)):
        assert texts_by_shapes(spec, PROMPTS, (20, 20, 20), shapes, 0) == expected


def test_a_head_that_is_split_drafts_the_same(model: LlamaForCausalLM, spec: Speculator) -> None:
    options: dict[str, Any] = {"do_sample": True, "temperature": 2.0, "seed": 3, "max_new_tokens": 24}
    found = []
    sizes: dict[str, Any] = {"tiers": (0, 3), "max_batch": 1, "max_len": 80, "backend": "eager"}
    with wrap(model, "eagle", draft=head_of(model, "Llama 2"), fused=False, policy="fixed:3", **sizes) as split:
        for made in (spec, split):
            made.set_tier(3)
            made.stats.reset()
            text = made.engine.submit(PROMPTS[0], **options).result().token_ids
            found.append((text, made.stats.accepted_tokens))
        assert "EAGLE head over the target's last hidden state" in split.explain()
    assert found[0] == found[1]


def test_a_drafter_that_copies_the_target_is_right(model: LlamaForCausalLM) -> None:
    """A head whose layer does nothing, and whose fc keeps the hidden state, repeats the target's newest token."""
    head = EagleHead.random(model, bias=False)
    with torch.no_grad():
        head.fc.weight.zero_()
        head.fc.weight[:, model.config.hidden_size :] = torch.eye(model.config.hidden_size)
        head.layers[0].self_attn.o_proj.weight.zero_()
        head.layers[0].mlp.down_proj.weight.zero_()
    sizes: dict[str, Any] = {"tiers": (0, 2), "max_batch": 1, "max_len": 40, "backend": "eager"}
    with wrap(model, "eagle", draft=head, policy="fixed:0", **sizes) as made:
        request = admitted(made.engine, PROMPTS[0], max_new_tokens=12)
        text = [*PROMPTS[0], *request.new_tokens]
        # The newest token is what the lm_head chose from that hidden state.
        assert drafted(made, request.slot, 2)[0] == [text[-1]] * 2


def test_other_drafts_are_refused(model: LlamaForCausalLM) -> None:
    with raises(InvalidOption, name="draft", value=None):
        wrap(model, "eagle", tiers=(0, 2), max_len=40)
    with raises(InvalidHead, reason=re.compile("in training mode")):
        wrap(model, "eagle", draft=EagleHead.random(model).train(), tiers=(0, 2), max_len=40)
    with raises(InvalidHead, reason=re.compile("must be torch.float32 on cpu")):
        wrap(model, "eagle", draft=EagleHead.random(model).half(), tiers=(0, 2), max_len=40)
    other = EagleHead.random(tiny_llama(vocab=64))
    with raises(InvalidHead, reason="it is for another target: its vocabulary has 64 tokens, the target's 128"):
        wrap(model, "eagle", draft=other, tiers=(0, 2), max_len=40)


def test_auto_knows_such_a_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}')
    assert head_kind(tmp_path) == ("EAGLE", 0)

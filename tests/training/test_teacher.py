"""The teacher knows the target's choices and distributions, also where a factor or a soft cap follows the lm_head."""

from __future__ import annotations

import re

import pytest
import torch

from speccompile.errors import UnsupportedModel
from speccompile.heads import MtpHead
from speccompile.training.after_lm_head import AfterLmHead
from speccompile.training.beginnings import final_scale, layer_weights
from speccompile.training.kinds import kind_of
from speccompile.training.mtp_chain import MtpChain
from speccompile.training.teacher import Teacher
from speccompile.training.train_options import KINDS, TrainOptions
from speccompile.training.unrolled import UnrolledTraining
from support.errors import raises
from support.families import model_of
from support.tiny import random_prompt
from support.training_data import VOCAB, learnable

#: Config keys, and what follows the lm_head.
FAMILIES: dict[str, tuple[dict[str, float], AfterLmHead]] = {
    "gemma2": ({"final_logit_softcapping": 5.0}, AfterLmHead(1.0, 5.0)),
    "cohere": ({"logit_scale": 0.25}, AfterLmHead(0.25)),
    "granite": ({"logits_scaling": 4.0}, AfterLmHead(0.25)),
    "recurrent_gemma": ({"logits_soft_cap": 5.0}, AfterLmHead(1.0, 5.0)),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_choices_and_distributions_are_those_of_the_target(name: str) -> None:
    config, after = FAMILIES[name]
    model = model_of(name, **config)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(20)
    teacher = Teacher(model, (0,))
    assert teacher.after == after
    text = torch.tensor([random_prompt(12, vocab=VOCAB)])
    with torch.no_grad():
        logits = model(text).logits
    states = teacher.read(text)
    assert torch.equal(states.choices, logits.argmax(-1))
    assert torch.equal(teacher.choices(states.final), logits.argmax(-1))
    torch.testing.assert_close(teacher.probs(states.final[0]), logits[0].float().softmax(-1))


def test_in_bfloat16_the_choices_are_of_unrounded_logits() -> None:
    model = model_of("granite", logits_scaling=4.0)
    text = torch.tensor([random_prompt(12, vocab=VOCAB)])
    full, teacher = Teacher(model, (0,)).read(text), Teacher(model, (0,), bfloat16=True)
    states = teacher.read(text)
    for name in ("tapped", "final"):
        ours, theirs = getattr(states, name), getattr(full, name)
        assert not torch.equal(ours, theirs)
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05 * float(theirs.abs().max()))
    assert torch.equal(states.choices, teacher.choices(states.final))


def test_a_head_that_drafts_some_tokens_learns_the_capped_distribution() -> None:
    model = model_of("granite", logits_scaling=4.0)
    teacher, ids = Teacher(model, (0,)), torch.tensor([3, 5, 9])
    module = UnrolledTraining(MtpChain(MtpHead.random(model)), teacher, ids, unroll=1, decay=1.0)
    text = torch.tensor([random_prompt(12, vocab=VOCAB)])
    probs, _ = module._target_probs(teacher.read(text).final, torch.ones_like(text, dtype=torch.bool))
    with torch.no_grad():
        torch.testing.assert_close(probs, model(text).logits[0][:, ids].softmax(-1))


def test_what_the_config_does_not_name_is_refused() -> None:
    model = learnable()
    model.lm_head.register_forward_hook(lambda _module, _inputs, output: 2 * output)
    for model.config.logit_scale in (None, 3.0):
        with raises(UnsupportedModel, model="LlamaForCausalLM", reason=re.compile("not a linear")):
            Teacher(model, (0,))
    model.config.logit_scale = 2.0
    assert Teacher(model, (0,)).after == AfterLmHead(2.0)


def test_a_head_begins_with_the_scale_of_norms_that_add_one_to_their_weight() -> None:
    model = model_of("gemma2")
    layer = model.get_decoder().layers[-1]
    expected = 1 + layer.input_layernorm.weight
    torch.testing.assert_close(layer_weights(layer)["input_layernorm.weight"], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(final_scale(model), 1 + model.get_decoder().norm.weight, rtol=1e-4, atol=1e-4)
    plain = learnable().model.layers[-1]
    assert layer_weights(plain)["input_layernorm.weight"] is plain.input_layernorm.weight


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_begins_with_the_factor_that_follows_the_target_s_lm_head(kind: str) -> None:
    model = model_of("granite", logits_scaling=4.0)
    made = kind_of(model, TrainOptions(kind=kind, layers=(0,) if kind != "mtp" else None))
    head = made.build(torch.ones(model.config.vocab_size, dtype=torch.int64), [])
    before = {name: value.clone() for name, value in head.state_dict().items()}
    made.training(head, Teacher(model, made.taps))
    name = {"eagle3": "lm_head.weight", "mtp": "norms.0.weight", "block": "norm.weight"}[kind]
    assert torch.equal(head.state_dict()[name], before[name] / 4)
    torch.testing.assert_close({**head.state_dict(), name: before[name]}, before)

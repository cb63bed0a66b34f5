"""Unrolled training steps of an MTP module compute what the decoding module computes."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from transformers import PreTrainedModel

from speccompile.errors import InvalidHead
from speccompile.heads import MtpHead
from speccompile.modes.mtp.variants import MIMO, MtpVariant
from speccompile.modes.network.draft_head import HeadCache
from speccompile.training.mtp_chain import MtpChain
from speccompile.training.teacher import Teacher
from speccompile.training.unrolled import UnrolledTraining, unrolled
from support.errors import raises
from support.families import model_of
from support.tiny import random_prompt
from support.training_data import VOCAB, learnable

LENGTH, STEPS = 10, 4
PLAIN = MtpVariant(normed_target=False, normed_carry=False, last_norm=False)
CASES: dict[str, tuple[Callable[[], PreTrainedModel], MtpVariant | None]] = {
    "llama": (learnable, None),
    "hidden state first": (learnable, MIMO),
    "without norms": (learnable, PLAIN),
    "experts and latent attention": (lambda: model_of("deepseek_v3"), None),
}


def decoded(head: MtpHead, text: list[int], hidden: torch.Tensor, row: int) -> torch.Tensor:
    """Logits ``[STEPS, V]`` of a chain that starts at ``row`` and reads ``text``, by the cache that decoding has."""
    shape = head.kv[0]
    keys, values = ({0: torch.zeros(1, LENGTH + STEPS, *size)} for size in (shape.key, shape.value))
    logits = []
    positions, tokens, states = torch.arange(row + 1)[None], text[1 : row + 2], hidden[None, : row + 1]
    for step in range(STEPS):
        cache = HeadCache(keys, values, torch.tensor([0]), positions)
        found = head(torch.tensor([tokens]), positions, states, cache)
        logits.append(found["logits"][0, -1])
        positions, tokens = torch.tensor([[row + step + 1]]), text[row + step + 2 : row + step + 3]
        states = unnormed(head, found["carried"][:, -1:])
    return torch.stack(logits)


def unnormed(head: MtpHead, carried: torch.Tensor) -> torch.Tensor:
    """``forward`` norms what it is given as the target's hidden states. Its output takes their place after that."""
    head.final_norm = torch.nn.Identity()
    return carried


@pytest.mark.parametrize("name", CASES)
def test_every_unrolled_step_is_that_of_the_decoding_module(name: str) -> None:
    make, variant = CASES[name]
    model = make()
    head = MtpHead.random(model, 1, seed=1, variant=variant)
    own = head.final_norm
    text = random_prompt(LENGTH, vocab=VOCAB)
    hidden = torch.randn(LENGTH, head.hidden_size)
    with torch.no_grad():
        expected = []
        for row in range(LENGTH - STEPS):
            head.final_norm = own
            expected.append(decoded(head, text, hidden, row))
        head.final_norm = own
        chain = MtpChain(head)
        steps = [chain.logits(left)[0] for left in unrolled(chain, torch.tensor([text]), hidden[None], STEPS)]
    for row, wanted in enumerate(expected):
        torch.testing.assert_close(torch.stack([step[row] for step in steps]), wanted, rtol=1e-3, atol=1e-4)


def test_the_modules_tensors_alone_are_trained_and_saved() -> None:
    model = learnable()
    head = MtpHead.random(model, 1)
    for own in (head.layers, head.norms):
        own.requires_grad_(True)
    module = UnrolledTraining(MtpChain(head), Teacher(model, (2,)), torch.arange(VOCAB), unroll=2, decay=0.8)
    names = {name.split(".")[1] for name in module.state_dict()}
    assert names == {"module", "norm"} and len(module.state_dict()) == len(MtpChain(head).state_dict())
    text = torch.tensor([random_prompt(LENGTH, vocab=VOCAB)])
    module(text, torch.ones_like(text, dtype=torch.bool))["loss"].backward()
    assert all(parameter.grad is not None for parameter in head.layers.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("family", "reason"), [("gemma2", "a soft cap on scores"), ("gpt_oss", "sinks")])
def test_attention_that_training_does_not_know_is_refused(family: str, reason: str) -> None:
    with raises(InvalidHead, source="of MTP modules", reason=re.compile(reason)):
        MtpChain(MtpHead.random(model_of(family), 1)).check()
